"""What a stage is told of its part in a request."""

from collections.abc import Collection, Iterable, Mapping
from typing import TypeVar

from stagemesh.orchestrator.request.recovery import Flow, Graph, attempt_of, is_open
from stagemesh.orchestrator.request.step_state import StepState
from stagemesh.orchestrator.request.validation import ValidRequest
from stagemesh.rpc.channels import MAX_MESSAGE_BYTES
from stagemesh.v1 import request_pb2, stage_pb2

_BINDINGS_BYTES = 256 << 10
"""What the rest of a step's message may take, with room to spare."""

_Binding = TypeVar("_Binding", stage_pb2.InputBinding, stage_pb2.OutputBinding)


class StepRequests:
    """Makes the messages for one request's steps, as its parts stand then."""

    def __init__(self, request: ValidRequest, graph: Graph, parts: Mapping[str, StepState]) -> None:
        self._request, self._graph, self._parts = request, graph, parts
        self._given_bytes = request.input.ByteSize() + request.parameters.ByteSize()

    def step_id(self, part: StepState) -> str:
        """Names the part's newest attempt."""
        return f"{self._request.request_id}/{part.name}/{part.attempt}"

    def told(self, part: StepState) -> Mapping[str, int]:
        """The attempts of the flows that a step which begins now is told."""
        flows = (*self._graph.incoming[part.name], *self._open_flows(part))
        return {flow.edge: attempt_of(flow, self._parts) for flow in flows}

    def execute(self, part: StepState) -> stage_pb2.ExecuteStepRequest:
        """Begins the part's newest attempt. Edges to stages that are done are left out."""
        step = part.step
        return stage_pb2.ExecuteStepRequest(
            request_id=self._request.request_id,
            step_id=self.step_id(part),
            attempt=part.attempt,
            input=self._input(part) if step.takes_input else None,
            parameters=self._parameters(part),
            inputs=self._inputs(part),
            absent=step.absent,
            outputs=self._outputs(part, self._open_flows(part)),
            streamed=list(step.output_names),
            priority=self._request.priority,
            resume_from=part.resumed.message if part.resumed is not None else None,
        )

    def can_resume_from(self, checkpoint: stage_pb2.Checkpoint) -> bool:
        """Whether a step can be told to go on from it: its state may be left out, or not fit beside the input."""
        has_state = bool(checkpoint.token_ids or checkpoint.tensors)
        return has_state and self._given_bytes + checkpoint.ByteSize() + _BINDINGS_BYTES <= MAX_MESSAGE_BYTES

    def rebind_inputs(self, part: StepState, edges: Collection[str]) -> stage_pb2.RebindStepRequest:
        """Has the part's step expect other producers."""
        rebindings = [
            stage_pb2.InputRebinding(binding=binding, first_rows=flow.carried(self._parts[flow.producer].first_rows))
            for flow, binding in zip(self._graph.incoming[part.name], self._inputs(part), strict=True)
            if flow.edge in edges
        ]
        return stage_pb2.RebindStepRequest(
            request_id=self._request.request_id, step_id=self.step_id(part), inputs=rebindings
        )

    def rebind_outputs(self, part: StepState, edges: Collection[str]) -> stage_pb2.RebindStepRequest:
        """Has the part's step feed other consumers."""
        flows = [flow for flow in self._graph.outgoing[part.name] if flow.edge in edges]
        return stage_pb2.RebindStepRequest(
            request_id=self._request.request_id, step_id=self.step_id(part), outputs=self._outputs(part, flows)
        )

    def _open_flows(self, part: StepState) -> list[Flow]:
        return [flow for flow in self._graph.outgoing[part.name] if is_open(flow, self._parts)]

    def _inputs(self, part: StepState) -> list[stage_pb2.InputBinding]:
        attempts = {flow.edge: attempt_of(flow, self._parts) for flow in self._graph.incoming[part.name]}
        return [_with_attempt(stage_pb2.InputBinding(), each, attempts[each.edge]) for each in part.step.inputs]

    def _outputs(self, part: StepState, flows: Iterable[Flow]) -> list[stage_pb2.OutputBinding]:
        attempts = {flow.edge: attempt_of(flow, self._parts) for flow in flows}
        bindings = (each for each in part.step.outputs if each.edge in attempts)
        return [_with_attempt(stage_pb2.OutputBinding(), each, attempts[each.edge]) for each in bindings]

    def _parameters(self, part: StepState) -> request_pb2.Parameters:
        """A stage refuses options and adapters that it does not know; the pipeline's were checked as a whole."""
        signature = part.step.stage.signature
        parameters = request_pb2.Parameters()
        parameters.CopyFrom(self._request.parameters)
        for name in set(parameters.options) - set(signature.options):
            del parameters.options[name]
        if not signature.adapters:
            parameters.ClearField("adapter")
        return parameters

    def _input(self, part: StepState) -> request_pb2.Input:
        """A stage is given what it knows of."""
        given = self._request.input
        if part.step.stage.signature.negative_prompt or not given.negative_prompt:
            return given
        known = request_pb2.Input()
        known.CopyFrom(given)
        known.ClearField("negative_prompt")
        return known


def _with_attempt(message: _Binding, binding: _Binding, attempt: int) -> _Binding:
    message.CopyFrom(binding)
    message.attempt = attempt
    return message
