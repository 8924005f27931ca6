"""Computes the outputs of fake stages, including the effect of sampling parameters on their texts. They depend only
on the seed, the prompt and the step.
"""

import hashlib
from collections.abc import Mapping, Sequence

import numpy as np

from stagemesh.common.errors import InvalidRequestError
from stagemesh.common.wire.tensors import Array, Tensors
from stagemesh.fake_engine import FRAME_WIDTH
from stagemesh.services.engines.base import END, Finish, SamplingOptions, Task
from stagemesh.services.engines.prompts import MediaFile, Medium

_LENGTHS, _ABSENT = ".lengths", -1
_STEP = "step"


def _sentence(key: bytes, step: int) -> Array:
    """Returns a short ASCII sentence, as uint8[bytes]. It depends on the key and the step."""
    return np.frombuffer(f"Step {step} is {hashlib.sha256(key).hexdigest()[:8]}. ".encode(), np.uint8)


def source_text(task: Task, step: int) -> Array:
    """Returns the text that a source emits at `step`, as uint8[bytes]: a short ASCII sentence."""
    return _sentence(f"{task.seed}/{task.prompt}/{step}".encode(), step)


def state_content(task: Task, size_bytes: int) -> bytes:
    """Returns the state that a prefill stage makes of a task: the repeated digest of the task's seed and prompt."""
    digest = hashlib.sha256(f"{task.seed}/{task.prompt}".encode()).digest()
    return np.resize(np.frombuffer(digest, np.uint8), size_bytes).tobytes()


def decoded_text(state: bytes, step: int) -> Array:
    """Returns the text that a decode stage makes of a state at `step`, as uint8[bytes].

    The text does not depend on the state's size. Raises InvalidRequestError (INVALID_TICKET) if the state is damaged.
    """
    key = state[: hashlib.sha256().digest_size]
    if state != np.resize(np.frombuffer(key, np.uint8), len(state)).tobytes():
        raise InvalidRequestError("the state that was handed over is damaged", reason="INVALID_TICKET")
    return _sentence(key + str(step).encode(), step)


def media_text(medium: Medium) -> Array:
    """Returns a line of text about an image, audio or a video: its kind, size in bytes and SHA-256 digest.

    Reads a file in small blocks.
    """
    if isinstance(medium, MediaFile):
        with medium.open() as content:
            size_bytes, digest = medium.size_bytes, hashlib.file_digest(content, "sha256").hexdigest()
    else:
        size_bytes, digest = medium.samples.nbytes, hashlib.sha256(medium.samples.tobytes()).hexdigest()
    return np.frombuffer(f"{medium.kind} {size_bytes} {digest}\n".encode(), np.uint8)


def resize_text(text: Array, size_bytes: int) -> Array:
    """Returns the text, repeated or cut to `size_bytes` bytes. If `size_bytes` is 0, returns the text unchanged."""
    return np.resize(text, size_bytes) if size_bytes and text.size else text


def compute_output(function: str, given: Tensors, *, frame_side: int = 16) -> Mapping[str, Array]:
    """Returns the tensors that a stage with this function emits for one input. `given` contains the input's
    tensors. `frame_side` is the width and the height of video frames, in pixels.
    """
    match function:
        case "frames":
            return {"frames": text_to_frames(given["text"])}
        case "mix":
            return {"frames": mix(given.get("text"), given.get("frames"))}
        case "sound":
            return {"audio": np.divide(given["frames"].reshape(-1), 256 * FRAME_WIDTH, dtype=np.float32)}
        case "video":
            text = given["text"]
            return {
                "frames": np.repeat(text, frame_side * frame_side * 3).reshape(len(text), frame_side, frame_side, 3)
            }
        case "prefill":
            return {}
        case _:
            return {"text": given["text"]}


def text_to_frames(text: Array) -> Array:
    """Converts text to float32[bytes, FRAME_WIDTH], one frame for each byte of the text.

    The frame of a byte contains the byte's value times 1, 2, 3, and so on.
    """
    return text[:, None].astype(np.float32) * np.arange(1, FRAME_WIDTH + 1, dtype=np.float32)


def mix(text: Array | None, frames: Array | None) -> Array:
    """Adds the sum of the text's bytes (modulo 256) to each value of the frames.

    If `frames` is None, first converts the text to frames. If `text` is None, adds nothing.
    """
    if frames is None:
        assert text is not None, "an input has at least one tensor"
        frames = text_to_frames(text)
    shift = int(text.sum(dtype=np.int64)) % 256 if text is not None else 0
    return np.add(frames, shift, dtype=np.float32)


def pack(inputs: Sequence[Tensors]) -> Tensors:
    """Converts a list of inputs to tensors for a checkpoint.

    For each tensor name, concatenates the tensors of all inputs and adds a tensor of their lengths. The length is -1
    for an input without a tensor of this name.
    """
    names = {name: tensor for given in inputs for name, tensor in given.items()}
    packed: dict[str, Array] = {}
    for name, like in names.items():
        packed[name] = np.concatenate([given.get(name, like[:0]) for given in inputs])
        lengths = [len(given[name]) if name in given else _ABSENT for given in inputs]
        packed[name + _LENGTHS] = np.array(lengths, np.int64)
    return packed


def is_packed(tensors: Tensors) -> bool:
    """Returns whether the tensors of a checkpoint contain inputs, which `pack` has added."""
    return any(name.endswith(_LENGTHS) for name in tensors)


def step_state(step: int) -> Tensors:
    """Returns the tensors of a checkpoint after `step` steps. They do not contain inputs.

    A stage that resumes from this checkpoint receives all inputs again.
    """
    return {_STEP: np.array([step], np.int64)}


def unpack(packed: Tensors) -> list[Tensors]:
    """Returns the inputs that the tensors of a checkpoint contain. Reverses `pack`."""
    inputs: list[dict[str, Array]] = []
    for name in [name for name in packed if name + _LENGTHS in packed]:
        end, lengths = 0, [int(length) for length in packed[name + _LENGTHS]]
        inputs += [{} for _ in lengths[len(inputs) :]]
        for given, length in zip(inputs, lengths, strict=True):
            if length != _ABSENT:
                given[name] = packed[name][end : end + length]
                end += length
    return list(inputs)


class SampledText:
    """The text of one task under its sampling parameters: `max_tokens`, `stop` and the structure.

    A stop text is found within the text of one step. A structure replaces the text of each step by the structure's own
    text, so that a test sees which stage received it.
    """

    def __init__(self, sampling: SamplingOptions) -> None:
        self._sampling = sampling
        self._steps = 0
        self.finish = END
        """Why the text ends, as far as it is known."""

    def limit(self, text: Array) -> Array | None:
        """Returns the text of the next step, without a stop text and what follows it. Returns None after the end."""
        sampling = self._sampling
        if self.finish.reason != "end":
            return None
        self._steps += 1
        if self._steps == sampling.max_tokens:
            self.finish = Finish("length")
        content = text.tobytes() if sampling.structure is None else sampling.structure.texts[0].encode()
        ends = {end: stop for stop in sampling.stop if (end := content.find(stop.encode())) >= 0}
        if ends:
            self.finish = Finish("stop", stop_text=ends[min(ends)])
            content = content[: min(ends)]
        return np.frombuffer(content, np.uint8)
