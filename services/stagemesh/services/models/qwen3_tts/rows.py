"""The input rows of the talker: text tokens and codes, whose embeddings are added."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from stagemesh.common.tensors import Array
from stagemesh.connectors.edge import Packet

Codes: TypeAlias = npt.NDArray[np.int32]
Vector: TypeAlias = npt.NDArray[np.float32]
_NO_CODE = -1


@dataclass(frozen=True, eq=False)
class SpokenPrompt:
    """A request as the talker reads it."""

    header: Sequence[int]
    """The text tokens that begin the assistant's message."""
    text: Sequence[int]
    """The text tokens to speak. If `frames` has frames, those of the reference voice precede them."""
    frames: Codes
    """The frames of the reference voice, int32[frames, groups], which the talker continues. There may be none."""
    instruction: Sequence[int] = ()
    """The text tokens of the user's message, which describes the voice."""
    language: int | None = None
    """The code of the language, or None if the talker chooses it."""
    speaker: int | Vector | None = None
    """The code of the speaker, or the x-vector of a reference voice, float32[width]."""
    whole_text: bool = False
    """Whether the prompt contains the whole text. Otherwise, a row for each frame contains a token of it."""


class RowWriter:
    """Writes the rows of requests for one checkpoint. `config` is the checkpoint's config."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        talker = config["talker_config"]
        self._pad, self._begin, self._end = (config[f"tts_{name}_token_id"] for name in ("pad", "bos", "eos"))
        self._groups: int = talker["num_code_groups"]
        self._codes = {name: int(talker[f"codec_{name}_id"]) for name in _SPECIAL}

    def write(self, prompt: SpokenPrompt) -> list[Packet]:
        """Returns one packet with the rows of the prompt, and one with those for the frames, if there are any.

        The rows of later frames are those of the padding, which the talker adds itself.
        """
        think, speaker = self._think(prompt.language), prompt.speaker
        voice = [] if speaker is None else [_NO_CODE if isinstance(speaker, np.ndarray) else speaker]
        first = [*prompt.instruction, *prompt.header]
        codes = [*[_NO_CODE] * len(first), *think, *voice, self._codes["pad"]]
        text_ids = [*first, *[self._pad] * (len(codes) - len(first) - 1), self._begin]
        text = [*prompt.text, self._end]
        if prompt.whole_text:
            text_ids, codes, text = [*text_ids, *text], [*codes, *[self._codes["pad"]] * len(text)], []
        spoken = 1 + len(prompt.frames)
        text_ids += [*text[:spoken], *[self._pad] * (spoken - len(text))]
        row_codes = np.concatenate([self._first_codes([*codes, self._codes["bos"]]), prompt.frames])
        tensors = _tensors(text_ids, row_codes)
        if isinstance(speaker, np.ndarray):
            tensors["states"] = np.zeros((len(text_ids), len(speaker)), np.float32)
            tensors["states"][len(first) + len(think)] = speaker
        packets = [Packet(tensors, {"token_start": 0, "prompt_tokens": len(text_ids)})]
        if later := text[spoken:]:
            rows = _tensors(later, self._first_codes([_NO_CODE] * len(later)))
            packets.append(Packet(rows, {"token_start": len(text_ids)}))
        return packets

    # -- internals

    def _think(self, language: int | None) -> list[int]:
        codes = self._codes
        if language is None:
            return [codes["nothink"], codes["think_bos"], codes["think_eos"]]
        return [codes["think"], codes["think_bos"], language, codes["think_eos"]]

    def _first_codes(self, codes: Sequence[int]) -> Codes:
        """Returns rows that have a first code alone, int32[rows, groups]."""
        rows = np.full((len(codes), self._groups), _NO_CODE, np.int32)
        rows[:, 0] = codes
        return rows


_SPECIAL = ("pad", "bos", "think", "nothink", "think_bos", "think_eos")


def _tensors(text_ids: Sequence[int], row_codes: Codes) -> dict[str, Array]:
    return {"text_ids": np.array(text_ids, np.int32), "row_codes": row_codes}
