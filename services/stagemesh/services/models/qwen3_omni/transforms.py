"""The transforms of Qwen3-Omni: from the thinker's tokens and states to the talker's input rows, and from the
talker's frames to code2wav.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
from pydantic import PositiveInt

from stagemesh.common.errors import InvalidRequestError
from stagemesh.common.wire.tensors import Array
from stagemesh.connectors.packets import Packet
from stagemesh.services.models.checkpoint import read_section, require_folder
from stagemesh.services.models.codec_speech.description import SpokenFrames, TalkerRows, Tokens
from stagemesh.services.models.qwen3_omni.description import TextTokens, read_config

_HEADER = 3
"""The number of tokens that begin the assistant's message: message start, role and line break."""
_PADDED = 4
_CODEC_SLOTS = 6
"""The length of the talker's codec prefix, whose codes are added to the last rows of the prompt."""
STATES = "hidden_states_accept"
_NO_TOKENS: Tokens = np.empty(0, np.int32)


class Thinker2Talker:
    """A `Transform` that writes the talker's rows as soon as the thinker's tokens and states for them have arrived.

    The talker's prompt consists of the user's messages and of nine rows that begin the answer: the header of the
    message, padding, a begin marker and the first token of the answer. Each later row has the next token of the answer.
    The last token of the thinker is not spoken, because it ends the answer; an end marker replaces it. A text row needs
    only the token. The row of an image, audio or video needs the thinker's state, and the positions of a prompt with
    media depend on the media, so that these rows wait for the thinker's prefill.
    """

    def __init__(self, model: Path | None) -> None:
        folder = require_folder(model, "transform qwen3_omni.thinker2talker", setting="`model` of the talker's stage")
        self._tokens = TextTokens.of(folder)
        self._rows = TalkerRows(codec_slots=_CODEC_SLOTS, media=self._tokens.media)
        self._prompt = _NO_TOKENS
        self._user: npt.NDArray[np.bool_] = np.empty(0, np.bool_)
        """Whether the user's messages contain each token of the prompt."""
        self._user_left = 0
        self._thinker_position = -1
        """The thinker's largest position among the rows so far."""
        self._unspoken = _NO_TOKENS
        """The sampled tokens that are not written yet. All wait until the prompt is written."""
        self._has_spoken = False
        """Whether the first token of the answer is written."""

    def push(self, packet: Packet) -> Sequence[Packet]:
        tensors = packet.tensors
        rows: list[Packet] = []
        if "prompt_ids" in tensors:
            rows += self._begin(tensors["prompt_ids"].astype(np.int32))
        if STATES in tensors and self._user_left:
            start = packet.metadata["token_start"]
            assert isinstance(start, int), "the thinker's engine writes the field"
            rows += self._continue_prompt(start, tensors[STATES], tensors["positions"].astype(np.int32))
        if "token_ids" in tensors:
            self._unspoken = np.concatenate([self._unspoken, tensors["token_ids"].astype(np.int32)])
        # Tokens may arrive before the states of the prompt from which they were sampled.
        if self._rows.prompt_rows and not self._user_left:
            rows += self._text_rows(self._take_spoken())
        return rows

    def finish(self) -> Sequence[Packet]:
        return [self._rows.write_text(np.array([self._tokens.eos], np.int32))] if self._rows.prompt_rows else []

    # -- internals

    def _take_spoken(self) -> Tokens:
        """Removes and returns the tokens that can be written.

        The last token waits for a further one, because it may be the end of the answer, which is not spoken. The first
        token of an answer does not wait unless it is an end token, so that the talker begins one step earlier.
        """
        waiting = len(self._unspoken)
        is_beginning = waiting == 1 and not self._has_spoken and int(self._unspoken[0]) not in self._tokens.answer_ends
        count = 1 if is_beginning else max(0, waiting - 1)
        taken, self._unspoken = np.split(self._unspoken, [count])
        self._has_spoken = self._has_spoken or count > 0
        return taken

    def _begin(self, prompt: Tokens) -> Iterator[Packet]:
        """Yields the rows of a prompt without media. With media, only determines which rows the prompt has."""
        tokens = self._tokens
        starts = np.flatnonzero(prompt[:-1] == tokens.message_start)
        roles = prompt[starts + 1]
        if not len(starts) or roles[-1] != tokens.assistant or starts[-1] + _HEADER > len(prompt):
            raise InvalidRequestError(
                "the prompt begins no answer of the assistant, which the talker needs; send a conversation, or a "
                "prompt in the form of the model's chat template, which ends with the assistant's turn",
                reason="INVALID_PROMPT",
            )
        lengths = np.diff(np.append(starts, len(prompt)))
        self._user = np.repeat(np.append(False, roles == tokens.user), np.append(starts[0], lengths))
        self._prompt, self._user_left = prompt, int(self._user.sum())
        self._rows.prompt_rows = self._user_left + _HEADER + _CODEC_SLOTS
        if not self._rows.has_media(prompt[self._user]):
            yield from self._text_rows(prompt[self._user])
            self._user_left = 0
        if not self._user_left:
            yield from self._begin_answer()

    def _continue_prompt(self, start: int, states: Array, positions: Tokens) -> Iterator[Packet]:
        """Yields the rows of the user's messages among the thinker's rows, which begin at position `start`."""
        taken = np.flatnonzero(self._user[start : start + len(states)])
        # The rows of other messages are left out, and the positions of the rows after them move up.
        for part in np.split(taken, np.flatnonzero(np.diff(taken) > 1) + 1) if len(taken) else ():
            first, end = start + int(part[0]), start + int(part[-1]) + 1
            if first == 0 or not self._user[first - 1]:
                self._thinker_position = int(positions[part[0]].max()) - 1
            ids, rows = self._prompt[first:end], self._rows
            moved = positions[part] - self._thinker_position - 1 + rows.next_position
            self._thinker_position = max(self._thinker_position, int(positions[part].max()))
            yield rows.write(rows.without_media(ids), moved, states[part] if rows.has_media(ids) else None)
            self._user_left -= len(ids)
        if not self._user_left:
            yield from self._begin_answer()

    def _begin_answer(self) -> Iterator[Packet]:
        tokens, prompt = self._tokens, self._prompt
        answer = np.flatnonzero(prompt[:-1] == tokens.message_start)[-1]
        markers = [*[tokens.pad] * _PADDED, tokens.bos]
        return self._text_rows(np.concatenate([prompt[answer : answer + _HEADER], np.array(markers, np.int32)]))

    def _text_rows(self, text_ids: Tokens) -> Iterator[Packet]:
        if len(text_ids):
            yield self._rows.write_text(text_ids)


class Talker2Code2Wav(SpokenFrames):
    """A `Transform` that removes frames that are not audio. `model` is the folder of the stage that applies it."""

    def __init__(self, model: Path | None) -> None:
        folder = require_folder(model, "transform qwen3_omni.talker2code2wav", setting="`model` of the edge's stages")
        super().__init__(codebook_size=_codebook_size(folder))


@dataclass(frozen=True)
class _CodebookConfig:
    codebook_size: PositiveInt = 2048


@lru_cache(maxsize=8)
def _codebook_size(model: Path) -> int:
    return read_section(model, read_config(model), name="code2wav_config", kind=_CodebookConfig).codebook_size
