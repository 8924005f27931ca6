"""The transform from the thinker's tokens and states to the talker's input rows."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from stagemesh.common.errors import InvalidRequestError
from stagemesh.common.tensors import Array
from stagemesh.connectors.edge import Packet
from stagemesh.services.models.qwen3_omni.description import TextTokens, read_config

_HEADER = 3
"""The number of tokens that begin the assistant's message: message start, role and line break."""
_PADDED = 4
_CODEC_SLOTS = 6
"""The length of the talker's codec prefix, whose codes are added to the last rows of the prompt."""
_NO_SLOT = -1


class Thinker2Talker:
    """A `Transform` that writes the talker's rows as soon as the thinker's tokens and states for them have arrived.

    The talker's prompt consists of the user's messages and of nine rows that begin the answer: the header of the
    message, padding, a begin marker and the first token of the answer. Each later row has the next token of the answer.
    The last token of the thinker is not spoken, because it ends the answer; an end marker replaces it.
    """

    def __init__(self, model: Path | None) -> None:
        if model is None:
            raise InvalidRequestError(
                "transform qwen3_omni.thinker2talker needs the checkpoint's config; set `model` of the talker's stage",
                reason="INVALID_CONFIG",
            )
        self._tokens = TextTokens.of(read_config(model))
        self._next_row = 0
        self._prompt_rows = 0
        self._last_token: int | None = None
        self._header: list[int] = []

    def push(self, packet: Packet) -> Sequence[Packet]:
        rows: list[Packet] = []
        if (prompt := packet.tensors.get("prompt_ids")) is not None:
            rows += self._begin(prompt)
        if (sampled := packet.tensors.get("token_ids")) is not None:
            rows += self._continue(sampled.tolist())
        return rows

    def finish(self) -> Sequence[Packet]:
        if not self._prompt_rows:
            return []
        return [self._rows([self._tokens.eos])]

    # -- internals

    def _begin(self, prompt: Array) -> Iterator[Packet]:
        tokens = self._tokens
        starts = np.flatnonzero(prompt == tokens.message_start)
        roles = {int(start): int(prompt[start + 1]) for start in starts if start + 1 < len(prompt)}
        answers = [start for start, role in roles.items() if role == tokens.assistant]
        if not answers:
            raise InvalidRequestError(
                "the prompt begins no answer of the assistant, which the talker needs; send a conversation, or apply "
                "the model's chat template",
                reason="INVALID_PROMPT",
            )
        ends = [*starts[1:].tolist(), len(prompt)]
        parts = zip(starts.tolist(), ends, strict=True)
        ids = [int(token) for start, end in parts if roles.get(start) == tokens.user for token in prompt[start:end]]
        header = prompt[answers[-1] : answers[-1] + _HEADER].tolist()
        self._prompt_rows = len(ids) + _HEADER + _CODEC_SLOTS
        yield self._rows([*ids, *header, *[tokens.pad] * _PADDED, tokens.bos])

    def _continue(self, sampled: list[int]) -> Iterator[Packet]:
        known = ([] if self._last_token is None else [self._last_token]) + sampled
        self._last_token = known[-1]
        if len(known) > 1:
            yield self._rows(known[:-1])

    def _rows(self, text_ids: list[int]) -> Packet:
        start, end = self._next_row, self._next_row + len(text_ids)
        self._next_row = end
        positions = np.arange(start, end, dtype=np.int32)
        slots = positions - (self._prompt_rows - _CODEC_SLOTS)
        tensors: dict[str, Array] = {
            "text_ids": np.array(text_ids, np.int32),
            "codec_slots": np.where((slots >= 0) & (slots < _CODEC_SLOTS), slots, _NO_SLOT).astype(np.int8),
            "positions": np.repeat(positions[:, None], 3, 1),
        }
        return Packet(tensors, {"token_start": start, "prompt_tokens": self._prompt_rows})
