"""The edges of a step: its incoming and outgoing flows and their peer replicas."""

import asyncio
from collections.abc import Callable, Iterable
from functools import partial

from stagemesh.common.errors import InvalidRequestError, NotFoundError, StagemeshError, StaleAttemptError
from stagemesh.connectors.data_plane import DataPlane
from stagemesh.connectors.edge import EdgeKey, Inlet, Outlet, StepPolicy
from stagemesh.connectors.flow.inlet import RebindingInlet
from stagemesh.connectors.flow.inlet_attempt import InletAttempt
from stagemesh.connectors.flow.outlet import RebindingOutlet
from stagemesh.connectors.flow.outlet_attempt import OutletAttempt
from stagemesh.connectors.flow.reconnect_policy import mendable
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
    """The edges of one run. Outgoing edges may outlive the run, for consumers that are replaced."""

    def __init__(self, spec: StepSpec, data_plane: DataPlane) -> None:
        self.request_id, self.step_id, self.attempt = spec.request_id, spec.step_id, spec.attempt
        self.outlets = data_plane.fan_out()
        """The outgoing edges of the pipeline."""
        self.on_over: Callable[[], None] = lambda: None
        """Called when no outgoing edge can be bound to another consumer any more."""
        self._plane = data_plane
        self._inputs = {binding.edge: binding for binding in spec.inputs}
        self._outputs = {binding.edge: binding for binding in spec.outputs}
        self._inlets: dict[str, RebindingInlet] = {}
        self._by_edge: dict[str, RebindingOutlet] = {}
        self._state_inlet: Inlet | None = None
        self._state_outlet: Outlet | None = None

    def open(self) -> None:
        """Opens all inlets and outlets."""
        for binding in self._inputs.values():
            flow = self._open_inlet(binding)
            if binding.edge == STATE_EDGE:
                self._state_inlet = flow
            else:
                self._inlets[binding.edge] = RebindingInlet(flow)
        for target in self._outputs.values():
            if target.edge == STATE_EDGE:
                self._state_outlet = self._open_outlet(target)
                continue
            outlet = RebindingOutlet(self._open_outlet(target), policy=target.policy, on_over=self._over)
            self._by_edge[target.edge] = outlet
            self.outlets.add(outlet, target.select)

    @property
    def inlets(self) -> dict[str, Inlet]:
        """The inlets of the pipeline's edges, by edge name."""
        return dict(self._inlets)

    @property
    def state_inlet(self) -> Inlet | None:
        """The inlet of the state from which the step resumes."""
        return self._state_inlet

    @property
    def state_outlet(self) -> Outlet | None:
        """The outlet of the state at which the step pauses."""
        return self._state_outlet

    @property
    def is_over(self) -> bool:
        """Whether no outgoing edge can be bound to another consumer."""
        return all(outlet.is_over for outlet in self._by_edge.values())

    def reports(self) -> tuple[tuple[FlowReport, ...], tuple[FlowReport, ...]]:
        """Returns the status of the incoming and of the outgoing flows."""
        inlets = tuple(
            FlowReport(self._inputs[edge].producer, inlet.standing) for edge, inlet in self._all_inlets().items()
        )
        standings = self.outlets.standings
        return inlets, tuple(FlowReport(self._outputs[each.edge].consumer, each) for each in standings)

    def rebind(self, rebinding: Rebinding) -> None:
        """Binds edges to other replicas: all of the named ones, or none if it raises.

        Raises NotReadyError (CHUNK_GONE, ROWS_MISSING) if an edge cannot continue with the new peer, StaleAttemptError
        if it is bound in a newer attempt, NotFoundError for an edge that the step does not have.
        """
        inputs = [each for each in rebinding.inputs if self._is_new_producer(each.binding)]
        outputs = [each for each in rebinding.outputs if self._is_new_consumer(each)]
        for each in inputs:
            self._inlets[each.binding.edge].check(each.first_rows)
        for target in outputs:
            self._by_edge[target.edge].check()
        for each in inputs:
            self._rebind_inlet(each)
        for target in outputs:
            self._outputs[target.edge] = target
            self._by_edge[target.edge].rebind(partial(self._open_outlet, target))

    async def close(self, error: StagemeshError | None, *, left_state: bool) -> None:
        """Closes all flows; after a run without an error, outlets keep the chunks that consumers may need again."""
        if error is not None:
            await self.outlets.abort(error)
        if self._state_outlet is not None and (error is not None or not left_state):
            ended = InvalidRequestError("the request ran to its end, and left no state", reason="NOT_PAUSED")
            await self._state_outlet.abort(error or ended)
        lost = error is not None and mendable(error)
        await asyncio.gather(*(inlet.aclose(lost=lost) for inlet in self._all_inlets().values()))
        self._inlets, self._state_inlet, self._state_outlet = {}, None, None

    def release(self, error: StagemeshError) -> None:
        """Releases the outlets that the run has left open."""
        for outlet in self._by_edge.values():
            outlet.release(error)

    # -- internal

    def _all_inlets(self) -> dict[str, Inlet]:
        return self.inlets if self._state_inlet is None else {**self._inlets, STATE_EDGE: self._state_inlet}

    def _open_inlet(self, binding: InputBinding) -> InletAttempt:
        return self._plane.open_inlet(self._key(binding), producer=binding.producer)

    def _open_outlet(self, target: OutputBinding) -> OutletAttempt:
        state = target.edge == STATE_EDGE
        return self._plane.open_outlet(
            self._key(target),
            endpoint=target.endpoint,
            consumer=target.consumer,
            connector=target.connector,
            # RebindingOutlet cuts the chunks of a pipeline edge, once for all its flows.
            policy=target.policy if state else StepPolicy(),
        )

    def _key(self, binding: InputBinding | OutputBinding) -> EdgeKey:
        return EdgeKey(self.request_id, binding.edge, self._attempt_of(binding))

    def _attempt_of(self, binding: InputBinding | OutputBinding) -> int:
        return binding.attempt or self.attempt

    def _rebind_inlet(self, rebinding: InputRebinding) -> None:
        binding = rebinding.binding
        self._inputs[binding.edge] = binding
        self._inlets[binding.edge].rebind(partial(self._open_inlet, binding), first_rows=rebinding.first_rows)

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
        """Returns whether a binding must be applied. One that `repeats` the current binding is not."""
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
