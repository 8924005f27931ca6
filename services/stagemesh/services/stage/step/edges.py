"""The edges of a step: its incoming and outgoing flows, and the replicas at their other ends."""

import asyncio
from collections.abc import Callable, Iterable

from stagemesh.common.errors import InvalidRequestError, NotFoundError, StagemeshError, StaleAttemptError
from stagemesh.connectors.data_plane import DataPlane
from stagemesh.connectors.edge import REBIND_S, EdgeKey, is_recoverable
from stagemesh.connectors.flow.inlet import Inlet
from stagemesh.connectors.flow.outlet import Outlet
from stagemesh.services.stage.step.events import FlowReport
from stagemesh.services.stage.step.spec import (
    STATE_EDGE,
    InputBinding,
    InputRebinding,
    OutputBinding,
    Rebinding,
    StepSpec,
)


class StepEdges:
    """The edges of one run. Outgoing edges may remain open after the run, so that their consumers can be replaced."""

    def __init__(self, spec: StepSpec, data_plane: DataPlane) -> None:
        self.request_id, self.step_id, self.attempt = spec.request_id, spec.step_id, spec.attempt
        self.outlets = data_plane.fan_out()
        """The outlets of the pipeline's edges. Excludes `state_outlet`."""
        self.on_over: Callable[[], None] = lambda: None
        """Called when no outgoing edge can be bound to another consumer any more."""
        self._plane = data_plane
        self._inputs = {binding.edge: binding for binding in spec.inputs}
        self._outputs = {binding.edge: binding for binding in spec.outputs}
        self._inlets: dict[str, Inlet] = {}
        self._by_edge: dict[str, Outlet] = {}
        self._state_inlet: Inlet | None = None
        self._state_outlet: Outlet | None = None

    def open(self) -> None:
        """Opens the inlets and outlets of all edges of the spec."""
        for binding in self._inputs.values():
            is_state = binding.edge == STATE_EDGE
            inlet = self._plane.open_inlet(
                self._key(binding), producer=binding.producer, rebind_s=0.0 if is_state else REBIND_S
            )
            if is_state:
                self._state_inlet = inlet
            else:
                self._inlets[binding.edge] = inlet
        for target in self._outputs.values():
            is_state = target.edge == STATE_EDGE
            outlet = self._plane.open_outlet(
                self._key(target),
                endpoint=target.endpoint,
                consumer=target.consumer,
                connector=target.connector,
                policy=target.policy,
                rebind_s=0.0 if is_state else REBIND_S,
                on_over=(lambda: None) if is_state else self._over,
            )
            if is_state:
                self._state_outlet = outlet
            else:
                self._by_edge[target.edge] = outlet
                self.outlets.add(outlet, target.select if target.is_selective else None)

    @property
    def inlets(self) -> dict[str, Inlet]:
        """The inlets of the pipeline's edges, by edge name. Excludes `state_inlet`."""
        return dict(self._inlets)

    @property
    def state_inlet(self) -> Inlet | None:
        """The inlet for the state from which the step resumes. None if the state does not arrive over an edge."""
        return self._state_inlet

    @property
    def state_outlet(self) -> Outlet | None:
        """The outlet for the state at which the step pauses. None if the state is not sent over an edge."""
        return self._state_outlet

    @property
    def is_over(self) -> bool:
        """Whether no outgoing edge can be bound to another consumer any more."""
        return all(outlet.is_over for outlet in self._by_edge.values())

    def reports(self) -> tuple[tuple[FlowReport, ...], tuple[FlowReport, ...]]:
        """Returns two tuples: the status of each incoming flow, and the status of each outgoing flow."""
        inlets = tuple(
            FlowReport(self._inputs[edge].producer, inlet.status) for edge, inlet in self._all_inlets().items()
        )
        outlets = tuple(
            FlowReport(self._outputs[edge].consumer, outlet.status) for edge, outlet in self._by_edge.items()
        )
        return inlets, outlets

    def rebind(self, rebinding: Rebinding) -> None:
        """Binds all named edges to other replicas, or no edge if an error is raised.

        Raises NotReadyError (CHUNK_GONE, ROWS_MISSING) if an edge cannot continue with the new peer, StaleAttemptError
        if an edge is bound in a newer attempt, and NotFoundError if the step does not have an edge.
        """
        inputs = [each for each in rebinding.inputs if self._is_new_producer(each.binding)]
        outputs = [each for each in rebinding.outputs if self._is_new_consumer(each)]
        for each in inputs:
            self._inlets[each.binding.edge].check_rebindable(each.first_rows)
        for target in outputs:
            self._by_edge[target.edge].check_rebindable()
        for each in inputs:
            self._rebind_inlet(each)
        for target in outputs:
            self._outputs[target.edge] = target
            self._plane.rebind_outlet(
                self._by_edge[target.edge],
                self._key(target),
                endpoint=target.endpoint,
                consumer=target.consumer,
                connector=target.connector,
            )

    async def close(self, error: StagemeshError | None, *, left_state: bool) -> None:
        """Closes all flows. If `error` is None, outlets retain the chunks that consumers may need again.

        `left_state` says whether the run paused and left a state from which another replica can resume the request.
        """
        if error is not None:
            self.release(error)
        if self._state_outlet is not None and (error is not None or not left_state):
            ended = InvalidRequestError("the request ran to its end and left no state", reason="NOT_PAUSED")
            self._state_outlet.abort(error or ended)
        lost = error is not None and is_recoverable(error)
        await asyncio.gather(*(inlet.aclose(lost=lost) for inlet in self._all_inlets().values()))
        self._inlets, self._state_inlet, self._state_outlet = {}, None, None

    def release(self, error: StagemeshError) -> None:
        """Aborts the outlets that are still open. Their consumers receive `error`."""
        for outlet in self._by_edge.values():
            outlet.abort(error)

    # -- internal

    def _all_inlets(self) -> dict[str, Inlet]:
        return self.inlets if self._state_inlet is None else {**self._inlets, STATE_EDGE: self._state_inlet}

    def _key(self, binding: InputBinding | OutputBinding) -> EdgeKey:
        return EdgeKey(self.request_id, binding.edge, self._attempt_of(binding))

    def _attempt_of(self, binding: InputBinding | OutputBinding) -> int:
        return binding.attempt or self.attempt

    def _rebind_inlet(self, rebinding: InputRebinding) -> None:
        binding = rebinding.binding
        self._inputs[binding.edge] = binding
        self._plane.rebind_inlet(
            self._inlets[binding.edge],
            self._key(binding),
            producer=binding.producer,
            first_rows=rebinding.first_rows,
        )

    def _is_new_producer(self, binding: InputBinding) -> bool:
        current, inlet = self._inputs.get(binding.edge), self._inlets.get(binding.edge)
        if inlet is None or current is None:
            raise self._unknown(binding.edge, self._inlets)
        same = current.producer == binding.producer
        return self._is_new(current, binding, repeats=same and not inlet.is_lost)

    def _is_new_consumer(self, target: OutputBinding) -> bool:
        current, outlet = self._outputs.get(target.edge), self._by_edge.get(target.edge)
        if outlet is None or current is None:
            raise self._unknown(target.edge, self._by_edge)
        same = (current.consumer, current.endpoint) == (target.consumer, target.endpoint)
        return self._is_new(current, target, repeats=same and not outlet.is_lost)

    def _is_new(
        self, current: InputBinding | OutputBinding, binding: InputBinding | OutputBinding, *, repeats: bool
    ) -> bool:
        """Returns whether a binding must be applied. `repeats` says whether it equals the current binding.

        Raises StaleAttemptError if the edge is bound in a newer attempt.
        """
        attempt, wanted = self._attempt_of(current), self._attempt_of(binding)
        if wanted < attempt:
            raise StaleAttemptError(
                f"edge {binding.edge} of step {self.step_id} is bound in attempt {attempt}, newer than {wanted}",
                metadata={"edge": binding.edge, "attempt": str(attempt)},
            )
        return wanted > attempt or not repeats

    def _unknown(self, edge: str, known: Iterable[str]) -> StagemeshError:
        names = ", ".join(known) or "none"
        return NotFoundError(
            f"step {self.step_id} has no edge {edge} that can be rebound; it has {names}", reason="UNKNOWN_EDGE"
        )

    def _over(self) -> None:
        if self.is_over:
            self.on_over()
