"""The interfaces of a codec language model: its description, and its model class for vLLM."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from stagemesh.common.wire.tensors import Value

if TYPE_CHECKING:
    import torch


class CodecModel(Protocol):
    """The description of a codec language model, created from the model's folder.

    An input row is the sum of the embeddings of its parts. A row of the prompt has a text token, an upstream state, or
    both, and may have codes: one of the codec prefix (tensor `codec_slots`), or given ones (tensor `row_codes`). The
    model's descriptor lists the tensors that its rows consist of.
    """

    groups: int
    """The number of codes of a frame."""
    end_code: int
    """The first code that ends the audio. The frame of this code is not audio."""
    state_width: int
    """The width of the upstream states that the model accepts."""
    text_vocabulary: int
    """The number of text tokens."""
    code_vocabularies: Sequence[int] = ()
    """The number of codes of each group, in the first group including special ones. Needed only if rows have
    `row_codes`.
    """
    hf_overrides: Callable[[Any], Any]
    """A module-level function that returns the language model's configuration from the whole model's."""
    sampling: Mapping[str, Any]
    """The default sampling parameters, by the names of `generation_config.json`."""

    def codec_prefix(self, options: Mapping[str, Value]) -> Sequence[int]:  # noqa: ARG002
        """Returns the codes that precede the first frame. Input rows refer to them by their index. By default none.

        `options` contains the request's options for the stage. Raises InvalidRequestError if an option is invalid.
        """
        return ()

    def choose_texts(
        self,
        text_ids: npt.NDArray[np.int32],
        options: Mapping[str, Value],  # noqa: ARG002
    ) -> npt.NDArray[np.int32]:
        """Returns the text tokens of rows, int32[rows], in which tokens that depend on the options are replaced.

        By default returns `text_ids`. `options` contains the request's options for the stage. Raises
        InvalidRequestError if an option is invalid.
        """
        return text_ids


class RowParts(NamedTuple):
    """The parts of input rows."""

    text_ids: "torch.Tensor"
    """The text token of each row, int64[rows], or -1 for a row that has only an upstream state."""
    states: "torch.Tensor | None"
    """The upstream states, [rows, state width], or None if there are none. A row without one has zeros."""
    codes: "torch.Tensor"
    """The first code of each row's frame or a special code, int64[rows], or -1 if the row has none."""
    residuals: "torch.Tensor"
    """The residual codes of each row's frame, int64[rows, groups - 1], or -1."""


class SampledFrames(NamedTuple):
    """Frames of which vLLM has sampled the first codes. Random numbers depend only on the seeds and the positions."""

    states: "torch.Tensor"
    """The hidden states that produced the first codes, [frames, width]."""
    codes: "torch.Tensor"
    """The first codes, int64[frames]."""
    seeds: "torch.Tensor"
    """The seeds of the requests, int64[frames]."""
    positions: "torch.Tensor"
    """The token positions of the frames, int64[frames]."""
    greedy: "torch.Tensor"
    """Whether to choose the most probable codes, bool[frames]."""


class CodecModule(Protocol):
    """The methods that the model class of a codec language model has in addition to vLLM's."""

    code_groups: int
    """The number of codes of a frame."""
    pad_text_id: int
    """The text token of a row whose text has ended."""
    adds_states: bool
    """Whether a row can have a state in addition to its text. Otherwise, a row has the one or the other."""

    def embed_rows(self, parts: RowParts) -> "torch.Tensor":
        """Returns the input embeddings of rows, [rows, width]."""
        ...

    def predict_residuals(self, frames: SampledFrames) -> "torch.Tensor":
        """Returns the residual codes of frames, int64[frames, groups - 1]."""
        ...
