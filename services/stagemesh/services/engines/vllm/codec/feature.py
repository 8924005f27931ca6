"""The codec feature: a stage runs a codec language model, which emits the codes of audio frames.

vLLM samples the first code of each frame like a token. A mixin for the model runner then predicts the frame's other
codes (`runner`). The input row of a frame is the sum of the embeddings of all codes of the frame before and of a text
token, which arrives over the edge.
"""

from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from stagemesh.common.errors import InvalidChunkError, InvalidRequestError
from stagemesh.common.plugins.descriptors import CodecModelDescriptor
from stagemesh.common.plugins.entry_points import import_factory, load_descriptor
from stagemesh.common.wire.tensors import Array, Tensors, TensorSpec
from stagemesh.connectors.arena.arena import Arena
from stagemesh.connectors.packets import Packet
from stagemesh.services.engines.base import Checkpoint, Task
from stagemesh.services.engines.options import request_options
from stagemesh.services.engines.vllm.codec.base import CodecModel
from stagemesh.services.engines.vllm.features import EngineRequest, RequestFeature, RequestHook, set_argument
from stagemesh.services.engines.vllm.options import AXES, CODEC_SLOTS, CODES, POSITIONS, ROW_CODES, STATES, CodecOptions
from stagemesh.services.engines.vllm.rows.input_memory import Column
from stagemesh.services.engines.vllm.rows.input_rows import InputRows, RowsPrompt
from stagemesh.services.engines.vllm.rows.row_receiver import EmittedRows, RowReceiver

if TYPE_CHECKING:
    from vllm.config import ModelConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

CODES_DTYPE = "int32"
RESIDUALS = "residuals"
"""The name of the column, and of the tensor in checkpoints, that contains all codes of frames except the first ones."""
TEXT_OFFSET = 2
"""The number that is added to text ids in the shared memory.

An absent row, which contains 0, means the model's padding, and 1 means a row with a state.
"""
CODE_OFFSET = 1
"""The number that is added to codes in the shared memory. 0 means no code."""


class Drawing(msgspec.Struct, frozen=True):
    """How a request's residual codes are drawn.

    The replica sends this object to vLLM's workers with the request (`features.set_argument`).
    """

    seed: int
    greedy: bool


class CodecRows(InputRows):
    """The request feature for the input rows of a codec language model."""

    runner_module = "stagemesh.services.engines.vllm.codec.runner"

    def __init__(self, options: CodecOptions, *, model: str, stage: str) -> None:
        """Raises NotReadyError (LOAD_FAILED) if the folder `model` does not contain a model of this kind."""
        super().__init__(stage=stage)
        self._descriptor = load_descriptor(CodecModelDescriptor, options.model)
        self._description: CodecModel = import_factory(self._descriptor.factory)(Path(model))
        self._specs = dict(self._descriptor.accepts)
        self._specs[STATES] = TensorSpec(options.dtype, ("tokens", self._description.state_width))
        self._dtype = options.dtype

    def set_arguments(self, arguments: "AsyncEngineArgs") -> None:
        super().set_arguments(arguments)
        if arguments.hf_overrides:
            raise self._invalid("hf_overrides selects the codec language model's part of the checkpoint; omit it")
        if arguments.pipeline_parallel_size > 1:
            raise self._invalid(
                "the first pipeline rank needs the codes that the last one predicts; set pipeline_parallel_size to 1"
            )
        arguments.hf_overrides = self._description.hf_overrides
        arguments.generation_config = "vllm"
        arguments.override_generation_config = {**self._description.sampling, **arguments.override_generation_config}

    def columns(self, model: "ModelConfig") -> list[Column]:  # noqa: ARG002  # the widths are in the description
        return [
            Column("text_ids", "int32", 1),
            Column("codes", CODES_DTYPE, 1, prompt_only=True),
            # The frames of a checkpoint are in this column after the prompt, where later rows must not replace them.
            Column(RESIDUALS, CODES_DTYPE, self._description.groups - 1, prompt_only=True),
            Column(POSITIONS, "int32", AXES),
            Column(STATES, self._dtype, self._description.state_width),
        ]

    async def start(self, llm: "AsyncLLM") -> None:
        await super().start(llm)
        # The codes are another vocabulary than the tokenizer's.
        setattr(llm.renderer, "get_eos_token_id", lambda: self._description.end_code)  # noqa: B010  # vLLM's own method
        llm.input_processor.generation_config_fields = {}

    def read_rows(self, task: Task, packet: Packet) -> Mapping[str, Array]:
        tensors = packet.tensors
        missing = self._descriptor.accepts.keys() - tensors.keys()
        if missing:
            raise InvalidChunkError(f"a chunk of input rows has no {', '.join(sorted(missing))}")
        for name, spec in self._specs.items():
            if name in tensors:
                spec.check(name, tensors[name])
        options = request_options(task.options, self._descriptor.options, stage=self._stage)
        text_ids = self._description.choose_texts(tensors["text_ids"].astype(np.int32, copy=False), options)
        _check_range("text_ids", text_ids, self._description.text_vocabulary)
        rows: dict[str, Array] = {"text_ids": text_ids.astype(np.int32) + TEXT_OFFSET}
        rows |= {name: tensors[name] for name in (POSITIONS, STATES) if name in tensors}
        if CODEC_SLOTS in tensors:
            prefix = np.array([-1, *self._description.codec_prefix(options)], np.int32) + CODE_OFFSET
            _check_range(CODEC_SLOTS, tensors[CODEC_SLOTS], len(prefix) - 1)
            rows["codes"] = prefix[tensors[CODEC_SLOTS].astype(np.int64) + 1]
        if ROW_CODES in tensors:
            rows |= self._read_codes(tensors[ROW_CODES])
        return rows

    def open(self, request: EngineRequest, held: AsyncExitStack) -> RequestHook | None:
        request.params.detokenize = False
        if request.task.resume_from is not None and isinstance(request.prompt, RowsPrompt):
            self._restore(request.prompt, request.task.resume_from)
        set_argument(request.params, Drawing(request.task.seed, greedy=request.params.temperature == 0))
        return super().open(request, held)

    # -- internals

    def _read_codes(self, codes: Array) -> dict[str, Array]:
        """Returns the columns of given codes, int32[rows, groups], which are -1 if a row does not have them."""
        counts = self._description.code_vocabularies
        if codes.shape[1] != len(counts):
            raise InvalidChunkError(f"{ROW_CODES} has {codes.shape[1]} codes in each row; the model has {len(counts)}")
        for group, count in enumerate(counts):
            _check_range(f"group {group} of {ROW_CODES}", codes[:, group], count)
        stored = codes.astype(np.int32) + CODE_OFFSET
        return {"codes": stored[:, 0], RESIDUALS: stored[:, 1:]}

    def _restore(self, prompt: RowsPrompt, checkpoint: Checkpoint) -> None:
        """Writes the residual codes of a checkpoint into the request's rows.

        The first codes are at the end of the prompt that vLLM receives.
        """
        residuals = checkpoint.tensors.get(RESIDUALS)
        shape = (len(checkpoint.token_ids), self._description.groups - 1)
        if residuals is None or residuals.shape != shape or residuals.dtype != np.int16:
            raise InvalidRequestError(
                f"the checkpoint does not have the residual codes of its {shape[0]} frames; send a checkpoint of this "
                "stage",
                reason="INVALID_CHECKPOINT",
            )
        first = len(prompt.token_ids)
        prompt.flow.write(RESIDUALS, first, residuals.astype(np.int32) + CODE_OFFSET)


class EmittedFrames(EmittedRows):
    """Buffers and emits the frames of one request, and retains their codes for checkpoints."""

    def __init__(self, request: EngineRequest) -> None:
        resumed = request.task.resume_from
        # The row of the prompt's last token produces the first frame.
        self._first = len(request.prompt.token_ids) - 1
        emitted = resumed.rows.get(CODES, 0) if resumed is not None else 0
        super().__init__(request, first_position=self._first + emitted)
        self._residuals: list[Array] = []
        if resumed is not None:
            self._restore(resumed)

    def push(self, position: int, tensors: Tensors) -> None:
        before = self.next_position
        super().push(position, tensors)
        if self.next_position > before:
            self._residuals.append(tensors[CODES][before - position :, 1:].astype(np.int16))

    def state(self, tokens: int) -> tuple[int, Tensors]:
        """Returns the number of frames so far, at most `tokens`, and the tensors that restore these frames.

        The worker's frames and vLLM's tokens arrive over different connections, so either may be ahead of the other.
        """
        residuals = np.concatenate(self._residuals)[:tokens] if self._residuals else np.empty((0, 0), np.int16)
        return len(residuals), {RESIDUALS: residuals}

    def _restore(self, checkpoint: Checkpoint) -> None:
        """Adds the frames of a checkpoint. Those that were not emitted before the checkpoint are emitted now."""
        tokens, residuals = np.array(checkpoint.token_ids, np.int32), checkpoint.tensors[RESIDUALS]
        codes = np.concatenate([tokens[:, None], residuals], 1, dtype=np.int32)
        emitted = self.next_position - self._first
        self._residuals.append(residuals[:emitted])
        self.push(self._first, {CODES: codes})


class CodecFrames(RequestFeature):
    """The request feature that emits the codes of each frame. The runner mixin of `CodecRows` writes them."""

    def __init__(self, arena: Arena | None, *, share_bytes: int) -> None:
        """`share_bytes` is the total size of the worker's partitions of the arena, in bytes."""
        self._rows = RowReceiver(arena, share_bytes=share_bytes)

    async def start(self, llm: "AsyncLLM") -> None:
        await super().start(llm)
        await self._rows.connect(llm, {CODES: CODES_DTYPE})

    def open(self, request: EngineRequest, held: AsyncExitStack) -> RequestHook | None:
        frames = EmittedFrames(request)
        request.saved_state = frames.state
        # Otherwise the request and its frames would reference each other after its end, and retain the arena's memory.
        held.callback(setattr, request, "saved_state", None)
        self._rows.open(frames, held)
        return frames

    def close(self) -> None:
        self._rows.close()


def _check_range(name: str, values: Array, count: int) -> None:
    if len(values) and (int(values.min()) < -1 or int(values.max()) >= count):
        raise InvalidChunkError(f"{name} contains values outside -1 to {count - 1}")
