"""The mixin for vLLM's model runner that runs a codec language model.

After vLLM has sampled the first codes of a step, the mixin predicts the other codes of these frames, and writes all
codes into the replica's arena. It retains the codes, because they are the next step's input, and because vLLM computes
all positions of a request again after a preemption.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from vllm.distributed.parallel_state import get_tp_group

from stagemesh.services.engines.vllm.codec.base import CodecModule, RowParts, SampledFrames
from stagemesh.services.engines.vllm.codec.feature import CODE_OFFSET, RESIDUALS, TEXT_OFFSET, Drawing
from stagemesh.services.engines.vllm.features import track_arguments
from stagemesh.services.engines.vllm.options import CODES, STATES
from stagemesh.services.engines.vllm.rows.input_memory import StepRows, TakesRowsV1, as_tensor
from stagemesh.services.engines.vllm.rows.row_writer import Attachment, RequestedRows, RowWriter, Slice

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput


class _Frames(NamedTuple):
    """The frames of one step: all codes [frames, groups], and the requests of the rows."""

    codes: torch.Tensor
    slices: list[Slice]


class RunnerV1(TakesRowsV1):
    """A mixin for the model runner in `vllm.v1.worker.gpu_model_runner` and its subclasses.

    All requests of the stage have input rows.
    """

    _rows: RowWriter | None = None
    _requested: dict[str, RequestedRows]
    _drawings: dict[str, Drawing]
    _residuals: torch.Tensor
    """The residual codes of each slot and token position, int64[slots, positions, groups - 1]."""
    _frames: _Frames | None = None

    def attach_inputs(self, ticket: bytes) -> None:
        """Opens the shared memory for input rows, and allocates the memory for residual codes."""
        super().attach_inputs(ticket)
        assert self._inputs is not None, "just attached"
        runner, sizes = cast("Any", self), self._inputs.ticket
        model: CodecModule = runner.get_model()
        shape = (sizes.slots, sizes.positions + 1, model.code_groups - 1)
        self._residuals = torch.zeros(shape, dtype=torch.long, device=runner.device)
        self._requested, self._drawings = {}, {}

    def attach_replica(self, attachment: bytes) -> None:
        """Prepares this worker to write the codes if it is the first rank. `attachment` is a serialized Attachment."""
        if get_tp_group().rank_in_group == 0:
            self._rows = RowWriter(msgspec.msgpack.decode(attachment, type=Attachment), device=cast("Any", self).device)

    def execute_model(self, scheduler_output: "SchedulerOutput", *args: Any, **kwargs: Any) -> Any:
        """Records how the codes of the step's new requests are drawn and emitted, then runs the forward pass."""
        if self._inputs is not None:
            track_arguments(self._requested, scheduler_output, RequestedRows)
            track_arguments(self._drawings, scheduler_output, Drawing)
        return super().execute_model(scheduler_output, *args, **kwargs)

    def embed(self, inputs_embeds: torch.Tensor, rows: StepRows) -> None:
        memory = self._inputs
        if memory is None or not self._slots:
            return
        requests = [self._slots[request_id] for request_id in rows.request_ids]
        starts, positions = rows.starts[: len(requests) + 1], rows.positions[: len(requests)]
        total, device, counts = int(starts[-1]), inputs_embeds.device, np.diff(starts)
        slots = np.repeat([request.slot for request in requests], counts)
        prompts = np.repeat([request.prompt_tokens for request in requests], counts)
        at = np.arange(total) + np.repeat(positions - starts[:-1], counts)
        text_ids = memory.columns["text_ids"][slots, at, 0].astype(np.int64) - TEXT_OFFSET
        codes = memory.columns["codes"][slots, at, 0].astype(np.int64) - CODE_OFFSET
        runner = cast("Any", self)
        model: CodecModule = runner.get_model()
        states = None
        if model.adds_states or (text_ids == -1).any():
            dtype = next(column.dtype for column in memory.ticket.columns if column.name == STATES)
            states = as_tensor(memory.columns[STATES][slots, at], dtype).to(device)
        in_prompt = torch.from_numpy(at < prompts).to(device)
        text = torch.from_numpy(np.where(text_ids == -TEXT_OFFSET, model.pad_text_id, text_ids)).to(device)
        sampled = runner.input_ids.gpu[:total].long()
        residuals = self._residuals[torch.from_numpy(slots).to(device), torch.from_numpy(at).to(device)]
        residuals = residuals.masked_fill(in_prompt[:, None], -1)
        given = memory.columns[RESIDUALS][slots, at].astype(np.int64)
        if given.any():
            written = torch.from_numpy(given).to(device)
            residuals = torch.where(written > 0, written - CODE_OFFSET, residuals)
        all_codes = torch.where(in_prompt, torch.from_numpy(codes).to(device), sampled)
        inputs_embeds[:total] = model.embed_rows(RowParts(text, states, all_codes, residuals))

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        """Samples the first codes, predicts the other codes, and reports the frames to the replica."""
        state = cast("Any", self).execute_model_state
        self._sample_states = None if state is None else state.sample_hidden_states
        self._frames = None
        output = cast("Any", super()).sample_tokens(*args, **kwargs)
        if self._frames is not None and self._rows is not None and self._frames.slices:
            with torch.inference_mode():
                self._rows.send(self._rows.copy({CODES: self._frames.codes}, self._frames.slices), {})
        return output

    def predict(
        self, sampled: torch.Tensor, states: torch.Tensor, request_ids: Sequence[str], positions: npt.NDArray[np.int64]
    ) -> None:
        """Predicts the frames whose first codes are `sampled`, int64[frames], and retains them.

        `states` [frames, width] contains the states that produced the codes, `request_ids` the requests of the frames,
        and `positions` the token positions of the codes.
        """
        model: CodecModule = cast("Any", self).get_model()
        device = states.device
        drawings = [self._drawings[request_id] for request_id in request_ids]
        at = torch.from_numpy(positions).to(device)
        seeds = torch.tensor([_signed(drawing.seed) for drawing in drawings], device=device)
        greedy = torch.tensor([drawing.greedy for drawing in drawings], device=device)
        residuals = model.predict_residuals(SampledFrames(states, sampled, seeds, at, greedy))
        slots = torch.tensor([self._slots[request_id].slot for request_id in request_ids], device=device)
        self._residuals[slots, at] = residuals
        codes = torch.cat([sampled[:, None], residuals], 1).int()
        requested = enumerate(map(self._requested.get, request_ids))
        slices = [
            Slice(each.name, int(positions[number]) - 1, number, 1)
            for number, each in requested
            if each is not None and positions[number] > each.first_position
        ]
        self._frames = _Frames(codes, slices)

    def _sample(self, *args: Any, **kwargs: Any) -> Any:
        output = cast("Any", super())._sample(*args, **kwargs)  # noqa: SLF001  # our own class
        runner = cast("Any", self)
        batch = runner.input_batch
        unfinished = runner.discard_request_mask.np[: batch.num_reqs]
        rows = [row for row in range(batch.num_reqs) if not unfinished[row] and batch.req_ids[row] in self._drawings]
        if self._inputs is not None and rows and self._sample_states is not None:
            starts = runner.query_start_loc.np
            ends = batch.num_computed_tokens_cpu[rows] + np.diff(starts[: batch.num_reqs + 1])[rows]
            sampled = output.sampled_token_ids[rows, 0].long()
            request_ids = [batch.req_ids[row] for row in rows]
            self.predict(sampled, self._sample_states[rows], request_ids, ends.astype(np.int64))
        return output

    def _calc_mrope_positions(self, scheduler_output: "SchedulerOutput") -> None:
        """Writes the positions of the step's rows for M-RoPE. The positions of the prompt arrive with its rows."""
        cast("Any", super())._calc_mrope_positions(scheduler_output)  # noqa: SLF001  # our own class
        if self._inputs is None:
            return
        runner, start = cast("Any", self), 0
        batch, column = runner.input_batch, self._inputs.columns["positions"]
        for row, request_id in enumerate(batch.req_ids):
            count, slot = scheduler_output.num_scheduled_tokens[request_id], self._slots.get(request_id)
            if slot is not None:
                at = np.arange(count) + int(batch.num_computed_tokens_cpu[row])
                last = slot.prompt_tokens - 1
                later = np.maximum(at - last, 0)[:, None]
                given = column[slot.slot, np.minimum(at, last)] + later
                runner.mrope_positions.cpu[:, start : start + count] = torch.from_numpy(given.T.astype(np.int64))
            start += count


def _signed(seed: int) -> int:
    """Returns the signed 64-bit number with the bits of a seed."""
    return (seed + (1 << 63)) % (1 << 64) - (1 << 63)
