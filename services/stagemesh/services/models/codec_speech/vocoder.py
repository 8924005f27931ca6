"""The vocoder stage of a codec speech model: a function that converts codec frames of many streams to audio."""

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from pydantic import JsonValue
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  # torch's own convention

from stagemesh.common.errors import InvalidChunkError
from stagemesh.common.wire.tensors import Tensors, Value
from stagemesh.connectors.packets import Packet
from stagemesh.services.engines.function.base import Call, Saves
from stagemesh.services.engines.options import parse_options
from stagemesh.services.engines.torch_setup import choose_device, compute_float32_exactly, set_up_torch
from stagemesh.services.models.codec_speech.streaming import BatchState, DecoderConfig, StreamState, WaveDecoder

_MAX_BATCH_FRAMES = {"cpu": 256, "cuda": 1024}
"""The maximum number of frames that are decoded together, summed over the streams of a batch, by the type of device.

Bounds the memory. With Qwen3-Omni's weights, 256 frames need 1.3 GB in float32.
"""

_GPU_BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
"""The numbers of streams that a GPU decodes together. Other batches are padded with copies of their last stream.

For each new shape, cuDNN chooses the kernel of each convolution. With Qwen3-Omni's weights on an H200, the first call
with a shape takes 70 to 170 ms, and a later one with one stream 8 ms.
"""

Codes: TypeAlias = npt.NDArray[np.int32]


class FrameDecoder(ABC):
    """A streaming decoder of codec frames. Subclasses convert the codes to the hidden states of a `WaveDecoder`."""

    reach: int
    """The number of last frames on which the state of a stream depends."""
    _embedding: Tensor
    """The embeddings of all codes, [groups * codebook size, width]."""

    def __init__(self, waves: WaveDecoder, config: DecoderConfig, *, device: torch.device) -> None:
        self.groups, self.codebook_size, self.device = config.num_quantizers, config.codebook_size, device
        self._offsets = torch.arange(self.groups, device=device, dtype=torch.int32) * self.codebook_size
        self._waves = waves

    def __call__(self, codes: Tensor, batch: BatchState) -> Tensor:
        """Converts int32[rows, frames, groups] to float32[rows, samples], and calls `batch.advance`."""
        samples = self._waves(self._transform(codes, batch), batch)
        batch.advance(codes.shape[1])
        return samples

    def remember(self, codes: Tensor, batch: BatchState) -> None:
        """Moves new streams to the state after int32[rows, frames, groups], and calls `batch.advance`.

        The frames are the last `reach` frames of each stream, or all of its frames.
        """
        # The convolutions are most of the work, and depend only on the last few frames.
        self._waves(self._transform(codes, batch)[:, -self._waves.reach :], batch)
        batch.advance(codes.shape[1])

    @abstractmethod
    def _transform(self, codes: Tensor, batch: BatchState) -> Tensor:
        """Converts int32[rows, frames, groups] to hidden states, [rows, frames, inputs]."""

    def _embed(self, codes: Tensor, *, mode: Literal["mean", "sum"]) -> Tensor:
        """Returns the mean or the sum of the embeddings of each frame's codes, [rows, frames, width]."""
        embedded = F.embedding_bag((codes + self._offsets).flatten(0, 1), self._embedding, mode=mode)
        return embedded.view(*codes.shape[:2], -1)


@dataclass
class VocoderState(StreamState):
    """The state of one stream, with the frames from which it can be restored."""

    recent: Codes = field(default_factory=lambda: np.zeros((0, 0), np.int32))
    """The last frames, at most `FrameDecoder.reach`, int32[frames, groups]."""


@dataclass(frozen=True)
class _VocoderOptions:
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"


class Placement(NamedTuple):
    """The device of a model, and the data type in which the model computes."""

    device: torch.device
    dtype: torch.dtype


def choose_placement(options: Mapping[str, JsonValue]) -> Placement:
    """Returns the device and the data type of a vocoder stage with these options. Sets torch up for the device.

    The option `device: auto` selects a GPU if the machine has one. `dtype: auto` selects float32 on a CPU and bfloat16
    on a GPU. Raises InvalidRequestError if an option is invalid, and NotReadyError if there is no GPU for
    `device: cuda`.
    """
    parsed = parse_options(_VocoderOptions, options, stage="")
    device = choose_device(parsed.device)
    set_up_torch(device)
    if parsed.dtype == "bfloat16" or (parsed.dtype == "auto" and device.type == "cuda"):
        return Placement(device, torch.bfloat16)
    compute_float32_exactly()
    return Placement(device, torch.float32)


class CodecVocoder(Saves[VocoderState]):
    """A `Function` that converts codec frames to audio. Its samples do not depend on the packet boundaries.

    Streams with equally many new frames are decoded in one batch. Streams at their first frames have separate batches.
    A long packet is decoded in pieces, and each piece is an output packet. A saved state consists of the last frames,
    because the retained inputs are more than a hundred times as large.
    """

    def __init__(self, decoder: FrameDecoder) -> None:
        self._decoder = decoder
        self._max_frames = _MAX_BATCH_FRAMES[decoder.device.type]
        any_number = range(1, self._max_frames + 1)
        self._batches: Sequence[int] = any_number if decoder.device.type == "cpu" else _GPU_BATCHES
        """The permitted numbers of streams in a batch, in ascending order from 1."""
        # The first call on a device is slow, because libraries load their kernels.
        for _ in self._decode(np.zeros((1, 1, decoder.groups), np.int32), BatchState([StreamState()])):
            pass

    def open(self, *, seed: int, options: Mapping[str, Value]) -> VocoderState:  # noqa: ARG002
        return VocoderState(recent=np.zeros((0, self._decoder.groups), np.int32))

    def save(self, state: VocoderState) -> Tensors:
        return {"frames": np.array(state.frames), "codes": state.recent}

    @torch.inference_mode()
    def restore(self, tensors: Tensors, *, seed: int, options: Mapping[str, Value]) -> VocoderState:
        state, frames, codes = self.open(seed=seed, options=options), int(tensors["frames"]), tensors["codes"]
        recent = codes.astype(np.int32)
        kept = min(frames, self._decoder.reach)
        if recent.shape != (kept, self._decoder.groups) or not _are_codes(recent, self._decoder.codebook_size):
            raise ValueError(f"codes {codes.dtype}{list(codes.shape)} are not the last ones of {frames} frames")
        if frames:
            state.frames, state.recent = frames - kept, recent
            rows = BatchState([state])
            self._decoder.remember(torch.from_numpy(recent[None]).to(self._decoder.device), rows)
            rows.commit()
        return state

    @torch.inference_mode()
    def __call__(self, batch: Sequence[Call[VocoderState]]) -> Sequence[Sequence[Packet]]:
        outputs: list[list[Packet]] = [[] for _ in batch]
        decoded: list[tuple[Sequence[int], Codes, BatchState]] = []
        for numbers in self._groups(batch):
            # The next permitted size of the batch.
            padding = next(size for size in self._batches if size >= len(numbers)) - len(numbers)
            last = batch[numbers[-1]].state
            copies = [StreamState(last.frames, last.memory) for _ in range(padding)]
            rows = BatchState([*(batch[number].state for number in numbers), *copies])
            codes = np.stack([_codes(batch[number]) for number in [*numbers, *[numbers[-1]] * padding]])
            for audio in self._decode(codes, rows):
                for number, samples in zip(numbers, audio[: len(numbers)], strict=True):
                    outputs[number].append(Packet({"audio": samples}))
            decoded.append((numbers, codes[: len(numbers)], rows))
        for numbers, codes, rows in decoded:
            rows.commit()
            for number, new in zip(numbers, codes, strict=True):
                state = batch[number].state
                state.recent = np.concatenate((state.recent, new))[-self._decoder.reach :]
        return outputs

    def _groups(self, batch: Sequence[Call[VocoderState]]) -> Iterator[Sequence[int]]:
        """Yields the numbers of the calls that are decoded together. Raises InvalidChunkError if codes are invalid."""
        groups: defaultdict[tuple[int, bool], list[int]] = defaultdict(list)
        for number, call in enumerate(batch):
            if call.packet is not None and len(_codes(call)):
                check_codes(
                    _codes(call), call.state.frames, groups=self._decoder.groups, size=self._decoder.codebook_size
                )
                groups[len(_codes(call)), call.state.memory is None].append(number)
        for (frames, _), numbers in groups.items():
            rows = max(size for size in self._batches if size <= max(1, self._max_frames // frames))
            yield from (numbers[start : start + rows] for start in range(0, len(numbers), rows))

    def _decode(self, codes: Codes, rows: BatchState) -> Iterator[npt.NDArray[np.float32]]:
        """Decodes int32[rows, frames, groups] in pieces. Yields float32[rows, samples] of each piece."""
        frames = max(1, self._max_frames // len(codes))
        for start in range(0, codes.shape[1], frames):
            piece = torch.from_numpy(codes[:, start : start + frames]).to(self._decoder.device)
            yield self._decoder(piece, rows).cpu().numpy()


def check_codes(codes: Codes, first_frame: int, *, groups: int, size: int) -> None:
    """Raises InvalidChunkError if codes [frames, groups] do not fit a vocoder with codes from 0 to `size` - 1.

    `first_frame` is the position of the first frame in the stream, for the error message.
    """
    if codes.shape[1] != groups:
        raise InvalidChunkError(
            f"the codec frames have {codes.shape[1]} codes each, but the vocoder's model has {groups} groups; use "
            "one model for talker and vocoder"
        )
    if not _are_codes(codes, size):
        frame, group = np.argwhere((codes < 0) | (codes >= size))[0]
        raise InvalidChunkError(
            f"codec frame {first_frame + frame} has the code {codes[frame, group]} in group {group}, but "
            f"codes are 0 to {size - 1}; remove frames with special codes by the edge's transform"
        )


def _are_codes(codes: Codes, size: int) -> bool:
    return bool(((codes >= 0) & (codes < size)).all())


def _codes(call: Call[VocoderState]) -> Codes:
    assert call.packet is not None, "the last call of a request has no codes"
    return call.packet.tensors["codes"].astype(np.int32, copy=False)
