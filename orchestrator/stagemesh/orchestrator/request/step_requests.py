"""Builds and sends the calls that one request makes to the replicas of its stages."""

import logging
from collections.abc import Collection, Iterable, Mapping
from copy import copy
from typing import TypeVar

from stagemesh.common.errors import StagemeshError
from stagemesh.orchestrator.request.recovery import Flow, Graph, attempt_of, is_open
from stagemesh.orchestrator.request.step_state import StepState, SupersededAttempt
from stagemesh.orchestrator.request.validation import ValidRequest
from stagemesh.rpc.channels import MAX_MESSAGE_BYTES
from stagemesh.v1 import request_pb2, stage_pb2

_log = logging.getLogger(__name__)

_REBIND_S = 5.0
_CANCEL_S = 5.0
_BINDINGS_BYTES = 256 << 10
"""The maximum size in bytes of an ExecuteStep message without its input, parameters and checkpoint."""

_Binding = TypeVar("_Binding", stage_pb2.InputBinding, stage_pb2.OutputBinding)


class StepRequests:
    """Builds the messages to a request's stages from the stages' current states. Sends those that rebind or cancel."""

    def __init__(self, request: ValidRequest, graph: Graph, states: Mapping[str, StepState]) -> None:
        self._request, self._graph, self._states = request, graph, states
        self._input_bytes = request.input.ByteSize() + request.parameters.ByteSize()

    def flow_attempts(self, state: StepState) -> Mapping[str, int]:
        """Returns the attempt of each flow of a step that starts now, by edge name. Omits finished consumers."""
        flows = (*self._graph.incoming[state.name], *self._open_flows(state))
        return {flow.edge: attempt_of(flow, self._states) for flow in flows}

    def execute(self, state: StepState) -> stage_pb2.ExecuteStepRequest:
        """Returns the message that starts the stage's newest attempt. Omits edges to finished consumers."""
        step = state.step
        return stage_pb2.ExecuteStepRequest(
            request_id=self._request.request_id,
            step_id=self._step_id(state),
            attempt=state.attempt,
            input=self._input(state) if step.takes_input else None,
            parameters=self._parameters(state),
            inputs=self._inputs(state),
            absent=step.absent,
            outputs=self._outputs(state, self._open_flows(state)),
            streamed=list(step.output_names),
            priority=self._request.priority,
            resume_from=state.resumed.message if state.resumed is not None else None,
        )

    def can_resume_from(self, checkpoint: stage_pb2.Checkpoint) -> bool:
        """Returns whether the checkpoint contains a state and fits into one message with the request's input."""
        has_state = bool(checkpoint.token_ids or checkpoint.tensors)
        return has_state and self._input_bytes + checkpoint.ByteSize() + _BINDINGS_BYTES <= MAX_MESSAGE_BYTES

    async def rebind_inputs(self, state: StepState, edges: Collection[str]) -> None:
        """Notifies the stage's replica of new producers on these edges. Raises the error that the replica returns."""
        rebindings = [
            stage_pb2.InputRebinding(binding=binding, first_rows=flow.carried(self._states[flow.producer].first_rows))
            for flow, binding in zip(self._graph.incoming[state.name], self._inputs(state), strict=True)
            if flow.edge in edges
        ]
        await self._rebind(state, inputs=rebindings)

    async def rebind_outputs(self, state: StepState, edges: Collection[str]) -> None:
        """Notifies the stage's replica of new consumers on these edges. Raises the error that the replica returns."""
        flows = [flow for flow in self._graph.outgoing[state.name] if flow.edge in edges]
        await self._rebind(state, outputs=self._outputs(state, flows))

    async def cancel(self, attempt: SupersededAttempt, error: StagemeshError | None = None) -> None:
        """Cancels an attempt on its replica. If the call fails, logs the error instead of raising it.

        `error` is the reason for the cancellation. If it is None, the reason is that a newer attempt has replaced this
        attempt.
        """
        if attempt.replica.end_cause is not None:
            return
        request = stage_pb2.CancelStepRequest(
            request_id=self._request.request_id,
            attempt=attempt.attempt,
            reason=error.message if error is not None else "a newer attempt has replaced it",
        )
        try:
            await attempt.replica.client.cancel(request, timeout_s=_CANCEL_S)
        except StagemeshError as exc:
            _log.warning("replica %s may still run the request: %s", attempt.replica.name, exc.message)

    async def _rebind(
        self,
        state: StepState,
        *,
        inputs: Collection[stage_pb2.InputRebinding] = (),
        outputs: Collection[stage_pb2.OutputBinding] = (),
    ) -> None:
        if state.replica.end_cause is not None:
            raise copy(state.replica.end_cause)
        request = stage_pb2.RebindStepRequest(
            request_id=self._request.request_id, step_id=self._step_id(state), inputs=inputs, outputs=outputs
        )
        await state.replica.client.rebind(request, timeout_s=_REBIND_S)
        assert state.notes is not None, "its replica is chosen"
        attempts = {each.binding.edge: each.binding.attempt for each in inputs}
        attempts |= {each.edge: each.attempt for each in outputs}
        state.bound = {**state.bound, **attempts}
        state.notes.note_rebound(list(attempts))
        _log.info("stage %s continues with other replicas on %s", state.name, ", ".join(attempts))

    def _step_id(self, state: StepState) -> str:
        return f"{self._request.request_id}/{state.name}/{state.attempt}"

    def _open_flows(self, state: StepState) -> list[Flow]:
        return [flow for flow in self._graph.outgoing[state.name] if is_open(flow, self._states)]

    def _inputs(self, state: StepState) -> list[stage_pb2.InputBinding]:
        attempts = {flow.edge: attempt_of(flow, self._states) for flow in self._graph.incoming[state.name]}
        return [_with_attempt(stage_pb2.InputBinding(), each, attempts[each.edge]) for each in state.step.inputs]

    def _outputs(self, state: StepState, flows: Iterable[Flow]) -> list[stage_pb2.OutputBinding]:
        attempts = {flow.edge: attempt_of(flow, self._states) for flow in flows}
        bindings = (each for each in state.step.outputs if each.edge in attempts)
        return [_with_attempt(stage_pb2.OutputBinding(), each, attempts[each.edge]) for each in bindings]

    def _parameters(self, state: StepState) -> request_pb2.Parameters:
        """Returns a copy of the request's parameters without any option or adapter that the stage does not support."""
        signature = state.step.stage.signature
        parameters = request_pb2.Parameters()
        parameters.CopyFrom(self._request.parameters)
        for name in set(parameters.options) - set(signature.options):
            del parameters.options[name]
        if not signature.adapters:
            parameters.ClearField("adapter")
        return parameters

    def _input(self, state: StepState) -> request_pb2.Input:
        """Returns the request's input. Omits the negative prompt if the stage does not support one."""
        given = self._request.input
        if state.step.stage.signature.negative_prompt or not given.negative_prompt:
            return given
        accepted = request_pb2.Input()
        accepted.CopyFrom(given)
        accepted.ClearField("negative_prompt")
        return accepted


def _with_attempt(message: _Binding, binding: _Binding, attempt: int) -> _Binding:
    message.CopyFrom(binding)
    message.attempt = attempt
    return message
