"""The transforms of Qwen2.5-Omni: from the thinker's tokens and states to the talker's input rows, and from the
talker's frames to token2wav.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from stagemesh.common.wire.tensors import Array
from stagemesh.connectors.packets import Packet
from stagemesh.services.models.checkpoint import require_folder
from stagemesh.services.models.codec_speech.description import SpokenFrames, TalkerRows, Tokens
from stagemesh.services.models.qwen2_5_omni.description import TextTokens, read_config

STATES = "hidden_states"
_CODEC_SLOTS = 2
"""The length of the talker's codec prefix, whose codes are added to the last rows of the prompt."""
_NO_TOKENS: Tokens = np.empty(0, np.int32)


class Thinker2Talker:
    """A `Transform` that writes the talker's rows as soon as the thinker's tokens and states for them have arrived.

    The talker's prompt consists of the thinker's prompt, a begin marker and the first token of the answer. Each later
    row has the next token of the answer. These rows consist of a token and the thinker's state of the token; those of
    an image, audio or video consist of the state alone. The last token of the thinker is not spoken, because it ends
    the answer and has no state; an end marker replaces it.
    """

    def __init__(self, model: Path | None) -> None:
        folder = require_folder(model, "transform qwen2_5_omni.thinker2talker", setting="`model` of the talker's stage")
        self._texts = TextTokens.of(read_config(folder))
        self._rows = TalkerRows(codec_slots=_CODEC_SLOTS, media=self._texts.media)
        self._tokens = _NO_TOKENS
        """The prompt and the sampled tokens."""
        self._prompt_tokens = 0
        self._next_token = 0
        """The position of the first token without a row."""
        self._early: list[tuple[Array, Array]] = []
        """States and positions whose tokens are not known yet, or may end the answer."""

    def push(self, packet: Packet) -> Sequence[Packet]:
        tensors = packet.tensors
        if "prompt_ids" in tensors:
            self._tokens, self._prompt_tokens = tensors["prompt_ids"].astype(np.int32), len(tensors["prompt_ids"])
            self._rows.prompt_rows = self._prompt_tokens + _CODEC_SLOTS
        if "token_ids" in tensors:
            self._tokens = np.concatenate([self._tokens, tensors["token_ids"].astype(np.int32)])
        if STATES in tensors:
            self._early.append((tensors[STATES], tensors["positions"]))
        return self._continue()

    def finish(self) -> Sequence[Packet]:
        if not self._prompt_tokens or self._next_token < self._prompt_tokens:
            return []
        return [self._marker(self._texts.end)]

    # -- internals

    def _continue(self) -> list[Packet]:
        """Returns the rows that can be written now."""
        rows: list[Packet] = []
        while self._early:
            (states, positions), start = self._early[0], self._next_token
            # Rows of the prompt and of the answer are apart. The last sampled token may end the answer.
            end = self._prompt_tokens if start < self._prompt_tokens else len(self._tokens) - 1
            count = min(len(states), end - start)
            if count <= 0:
                break
            self._early[0] = states[count:], positions[count:]
            if not len(states[count:]):
                self._early.pop(0)
            rows += self._state_rows(states[:count], positions[:count])
        return rows

    def _state_rows(self, states: Array, positions: Array) -> list[Packet]:
        start, end = self._next_token, self._next_token + len(states)
        ids, self._next_token = self._tokens[start:end], end
        if start >= self._prompt_tokens:
            # The begin marker moves the answer by one position.
            return [self._rows.write(ids, positions.astype(np.int32) + 1, states)]
        rows = [self._rows.write(self._rows.without_media(ids), positions.astype(np.int32), states)]
        if end == self._prompt_tokens:
            rows.append(self._marker(self._texts.begin))
        return rows

    def _marker(self, token: int) -> Packet:
        return self._rows.write_text(np.array([token], np.int32))


def make_talker2token2wav(model: Path | None) -> SpokenFrames:
    """Returns the transform. `model` is the checkpoint folder of the stage that applies it."""
    folder = require_folder(model, "transform qwen2_5_omni.talker2token2wav", setting="`model` of the edge's stages")
    # The table of the vocoder has one code more than it is trained for.
    codes: int = read_config(folder)["token2wav_config"]["dit_config"]["num_embeds"]
    return SpokenFrames(codebook_size=codes + 1)
