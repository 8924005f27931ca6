"""The edges of a step: their flows and their peer replicas."""

import asyncio
from collections.abc import Callable, Mapping
from contextlib import aclosing
from pathlib import Path

from stagemesh.common.errors import InvalidRequestError, NotFoundError, StagemeshError, StaleAttemptError
from stagemesh.common.wire.tensors import TensorSpec
from stagemesh.connectors import peer_timeouts
from stagemesh.connectors.data_plane import DataPlane
from stagemesh.connectors.flow.inlet import Inlet, merge
from stagemesh.connectors.flow.outlet import FanOut, Outlet
from stagemesh.connectors.packets import EdgeKey
from stagemesh.services.engines.user_errors import UserErrors
from stagemesh.services.stage.step.inputs import EdgeInput, EdgeTransform
from stagemesh.services.stage.step.spec import STATE_EDGE, InputBinding, OutputBinding, Rebinding, StepSpec
from stagemesh.v1 import control_pb2


class StepEdges:
    """The edges of one run of a step. Outgoing edges may remain open after the run has ended, so that their consumers
    can be replaced.
    """

    def __init__(self, spec: StepSpec, data_plane: DataPlane, *, model: Path | None, user_errors: UserErrors) -> None:
        """`model` is the path of the stage's model, which transforms receive, or None if the stage has no model.

        `user_errors` converts the exceptions of transforms.
        """
        self.request_id, self.step_id, self.attempt = spec.request_id, spec.step_id, spec.attempt
        self.outlets: FanOut | None = None
        """The outlets of the pipeline's edges, without `state_outlet`. None if the step has no such outlet."""
        self.state_inlet: Inlet | None = None
        """The inlet that receives the state from which the step resumes. None if no edge delivers the state."""
        self.state_outlet: Outlet | None = None
        """The outlet that sends the state at which the step pauses. None if no edge transfers the state."""
        self._plane, self._model, self._user_errors, self._trace = data_plane, model, user_errors, spec.trace
        self._first_rows = spec.task.resume_from.rows if spec.task.resume_from is not None else {}
        self._inputs = {binding.edge: binding for binding in spec.inputs}
        self._outputs = {binding.edge: binding for binding in spec.outputs}
        self._inlets: dict[str, Inlet] = {}
        self._by_edge: dict[str, Outlet] = {}
        self._accepts_only_tickets = False
        self._lowest_attempt = 0

    def open(self, accepts: Mapping[str, TensorSpec], on_packet: Callable[[], None]) -> dict[str, "EdgeInput"]:
        """Opens the inlets and outlets of all edges of the spec.

        Returns the engine's input from each incoming edge of the pipeline, by edge name. `accepts` contains the tensors
        that the stage accepts, by name. `on_packet` is called each time before the engine receives a packet.

        Raises NotFoundError if an edge names an unknown transform.
        """
        kinds = {spec.ticket_kind for spec in accepts.values() if spec.ticket_kind}
        tensors = {name: spec for name, spec in accepts.items() if not spec.ticket_kind}
        self._accepts_only_tickets = all(spec.ticket_kind for spec in accepts.values())
        for binding in self._inputs.values():
            inlet = self._plane.open_inlet(
                self._key(binding),
                producer=binding.peer,
                rebind_s=_rebind_s(binding.edge),
                ticket_kinds=kinds,
                accepts={} if binding.transform or binding.edge == STATE_EDGE else tensors,
            )
            if binding.edge == STATE_EDGE:
                self.state_inlet = inlet
            else:
                self._inlets[binding.edge] = inlet
        for target in self._outputs.values():
            outlet = self._plane.open_outlet(
                self._key(target),
                target.peer,
                connector=target.connector,
                policy=target.policy,
                rebind_s=_rebind_s(target.edge),
                first_rows={} if target.edge == STATE_EDGE else self._first_rows,
            )
            if target.edge == STATE_EDGE:
                self.state_outlet = outlet
            else:
                self._by_edge[target.edge] = outlet
                self.outlets = self.outlets or self._plane.fan_out()
                self.outlets.add(outlet, target.select if target.is_selective else None)
        # All flows are open before an unknown transform raises an error, so that every peer receives the error.
        for edge, outlet in self._by_edge.items():
            outlet.chunks.trace = self._trace
            if name := self._outputs[edge].transform:
                outlet.transform = self._transform(name, edge)
        return {
            edge: EdgeInput(
                inlet,
                edge=edge,
                transform=self._transform(name, edge) if (name := self._inputs[edge].transform) else None,
                accepts=accepts,
                on_packet=on_packet,
            )
            for edge, inlet in self._inlets.items()
        }

    @property
    def is_over(self) -> bool:
        """Whether none of the outgoing edges can be bound to another consumer any more."""
        return all(outlet.is_over for outlet in self._by_edge.values())

    def inlet_reports(self) -> list[control_pb2.FlowReport]:
        """Returns a report on each incoming flow. `peer` is the flow's producer replica."""
        return [inlet.report(producer=self._inputs[edge].peer) for edge, inlet in self._all_inlets().items()]

    def outlet_reports(self) -> list[control_pb2.FlowReport]:
        """Returns a report on each outgoing flow, except the flow of `state_outlet`. `peer` is the flow's consumer
        replica.
        """
        return [outlet.report(consumer=self._outputs[edge].peer.replica) for edge, outlet in self._by_edge.items()]

    @property
    def flow_attempts(self) -> Mapping[str, int]:
        """The attempt in which the flow of each edge is bound, by edge name."""
        bindings: list[InputBinding | OutputBinding] = [*self._inputs.values(), *self._outputs.values()]
        return {each.edge: each.attempt for each in bindings}

    def reject_below(self, attempt: int) -> None:
        """Rejects rebindings in lower attempts than `attempt` from now on."""
        self._lowest_attempt = max(self._lowest_attempt, attempt)

    def rebind(self, rebinding: Rebinding) -> None:
        """Binds all edges in `rebinding` to other replicas. If an error is raised, no edge has been bound.

        Raises NotReadyError (CHUNK_GONE, ROWS_MISSING) if an edge cannot continue with the new peer, StaleAttemptError
        if an edge is already bound in a newer attempt, and NotFoundError if the step does not have one of the edges.
        """
        inputs = [each for each in rebinding.inputs if self._is_new(each, self._inputs, self._inlets)]
        outputs = [each for each in rebinding.outputs if self._is_new(each, self._outputs, self._by_edge)]
        for source in inputs:
            self._inlets[source.edge].check_rebindable(source.first_rows)
        for target in outputs:
            self._by_edge[target.edge].check_rebindable()
        for source in inputs:
            self._inputs[source.edge] = source
            self._plane.rebind_inlet(
                self._inlets[source.edge], self._key(source), producer=source.peer, first_rows=source.first_rows
            )
        for target in outputs:
            self._outputs[target.edge] = target
            outlet = self._by_edge[target.edge]
            self._plane.rebind_outlet(outlet, self._key(target), consumer=target.peer, connector=target.connector)

    async def close(self, error: StagemeshError | None, *, left_state: bool) -> None:
        """Closes all flows. If `error` is None, outlets retain the chunks that consumers may need again. Otherwise,
        consumers receive `error`.

        `left_state` is True if the run paused and left a state from which another replica can resume the request.
        """
        if error is not None:
            self.abort(error)
        if self.state_outlet is not None and (error is not None or not left_state):
            ended = InvalidRequestError("the request ran to its end and left no state", reason="NOT_PAUSED")
            self.state_outlet.abort(error or ended)
        lost = error is not None and peer_timeouts.is_recoverable(error)
        await asyncio.gather(*(inlet.aclose(lost=lost) for inlet in self._all_inlets().values()))
        self._inlets, self.state_inlet, self.state_outlet = {}, None, None

    async def discard_unread(self) -> None:
        """Reads the incoming edges of the pipeline to their ends and discards the packets, if the engine ended earlier.

        Otherwise, the producers would be rejected, their steps would fail, and the request would fail with them. Raises
        the error of an edge that fails. A stage that accepts only tickets does not wait for the ends, because it
        ends early if it computes the state itself, for example when a producer is missing.
        """
        if self._accepts_only_tickets:
            for inlet in self._inlets.values():
                inlet.leave()
            return
        # At once, because a producer may wait for credit on one edge before it ends another.
        async with aclosing(merge(list(self._inlets.values()))) as packets:
            async for _ in packets:
                pass

    def abort(self, error: StagemeshError) -> None:
        """Aborts the outlets of the pipeline's edges. Their consumers receive `error`."""
        for outlet in self._by_edge.values():
            outlet.abort(error)

    # -- internal

    def _transform(self, name: str, edge: str) -> "EdgeTransform":
        return EdgeTransform(name, edge=edge, model=self._model, user_errors=self._user_errors)

    def _all_inlets(self) -> dict[str, Inlet]:
        return self._inlets if self.state_inlet is None else {**self._inlets, STATE_EDGE: self.state_inlet}

    def _key(self, binding: InputBinding | OutputBinding) -> EdgeKey:
        return EdgeKey(self.request_id, binding.edge, binding.attempt)

    def _is_new(
        self,
        binding: InputBinding | OutputBinding,
        bound: Mapping[str, InputBinding | OutputBinding],
        flows: Mapping[str, Inlet | Outlet],
    ) -> bool:
        """Returns whether a binding must be applied. Returns False if it repeats the current binding of a flow that has
        not failed.

        Raises NotFoundError if the step does not have the edge, and StaleAttemptError if the edge is already bound in a
        newer attempt, or if a later orchestrator rejects the attempt (`reject_below`).
        """
        current, flow = bound.get(binding.edge), flows.get(binding.edge)
        if current is None or flow is None:
            raise NotFoundError(
                f"step {self.step_id} has no edge {binding.edge} that can be rebound; it has "
                f"{', '.join(flows) or 'none'}",
                reason="UNKNOWN_EDGE",
            )
        if binding.content != current.content:
            raise InvalidRequestError(
                f"a rebinding of edge {binding.edge} cannot change what it transfers, {current.content}",
                reason="INVALID_EDGE",
            )
        attempt, wanted = max(current.attempt, self._lowest_attempt), binding.attempt
        if wanted < attempt:
            raise StaleAttemptError(
                f"edge {binding.edge} of step {self.step_id} cannot be bound in attempt {wanted}: it is bound in "
                f"{current.attempt}, and its orchestrator uses attempts from {self._lowest_attempt} on",
                metadata={"edge": binding.edge},
                facts={"attempt": attempt},
            )
        return wanted > current.attempt or flow.is_lost or binding.peer != current.peer


def _rebind_s(edge: str) -> float:
    return 0.0 if edge == STATE_EDGE else peer_timeouts.REBIND_S
