"""The edges of a step: their flows, their peer replicas, and the packets that the engine receives over them."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from stagemesh.common.connector_descriptors import number_of
from stagemesh.common.descriptors import import_factory, load_transform_descriptor
from stagemesh.common.errors import (
    InternalError,
    InvalidChunkError,
    InvalidRequestError,
    NotFoundError,
    StagemeshError,
    StaleAttemptError,
)
from stagemesh.common.tensors import TensorSpec
from stagemesh.common.user_errors import UserErrors
from stagemesh.connectors.data_plane import DataPlane
from stagemesh.connectors.edge import REBIND_S, EdgeKey, FlowStatus, Packet, is_recoverable, packets_problem
from stagemesh.connectors.flow.inlet import Inlet
from stagemesh.connectors.flow.merging import merge
from stagemesh.connectors.flow.outlet import FanOut, Outlet
from stagemesh.connectors.tickets import Ticket
from stagemesh.services.engines.base import Transform
from stagemesh.services.stage.step.results import ResultCheck, check_lengths
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
        self._inputs = {binding.edge: binding for binding in spec.inputs}
        self._outputs = {binding.edge: binding for binding in spec.outputs}
        self._inlets: dict[str, Inlet] = {}
        self._by_edge: dict[str, Outlet] = {}
        self._accepts_only_tickets = False

    def open(self, accepts: Mapping[str, TensorSpec], on_packet: Callable[[], None]) -> dict[str, "EdgeInput"]:
        """Opens the inlets and outlets of all edges of the spec.

        Returns the engine's input from each incoming edge of the pipeline, by edge name. `accepts` contains the tensors
        that the stage accepts, by name. `on_packet` is called each time before the engine receives a packet.

        Raises NotFoundError if an edge names an unknown transform.
        """
        kinds = {spec.ticket_kind for spec in accepts.values() if spec.ticket_kind}
        self._accepts_only_tickets = all(spec.ticket_kind for spec in accepts.values())
        for binding in self._inputs.values():
            inlet = self._plane.open_inlet(
                self._key(binding),
                producer=binding.producer,
                rebind_s=_rebind_s(binding.edge),
                ticket_kinds=kinds,
            )
            if binding.edge == STATE_EDGE:
                self.state_inlet = inlet
            else:
                self._inlets[binding.edge] = inlet
        for target in self._outputs.values():
            outlet = self._plane.open_outlet(
                self._key(target),
                endpoint=target.endpoint,
                consumer=target.consumer,
                connector=target.connector,
                policy=target.policy,
                server_name=target.server_name,
                rebind_s=_rebind_s(target.edge),
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
        return [_report(self._inputs[edge].producer, inlet.status) for edge, inlet in self._all_inlets().items()]

    def outlet_reports(self) -> list[control_pb2.FlowReport]:
        """Returns a report on each outgoing flow, except the flow of `state_outlet`. `peer` is the flow's consumer
        replica.
        """
        return [_report(self._outputs[edge].consumer, outlet.status) for edge, outlet in self._by_edge.items()]

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
                self._inlets[source.edge], self._key(source), producer=source.producer, first_rows=source.first_rows
            )
        for target in outputs:
            self._outputs[target.edge] = target
            self._plane.rebind_outlet(
                self._by_edge[target.edge],
                self._key(target),
                endpoint=target.endpoint,
                consumer=target.consumer,
                connector=target.connector,
                server_name=target.server_name,
            )

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
        lost = error is not None and is_recoverable(error)
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

    def _transform(self, name: str, edge: str) -> "_EdgeTransform":
        return _EdgeTransform(name, edge=edge, model=self._model, user_errors=self._user_errors)

    def _all_inlets(self) -> dict[str, Inlet]:
        return self._inlets if self.state_inlet is None else {**self._inlets, STATE_EDGE: self.state_inlet}

    def _key(self, binding: InputBinding | OutputBinding) -> EdgeKey:
        return EdgeKey(self.request_id, binding.edge, binding.attempt or self.attempt)

    def _is_new(
        self,
        binding: InputBinding | OutputBinding,
        bound: Mapping[str, InputBinding | OutputBinding],
        flows: Mapping[str, Inlet | Outlet],
    ) -> bool:
        """Returns whether a binding must be applied. Returns False if it repeats the current binding of a flow that has
        not failed.

        Raises NotFoundError if the step does not have the edge, and StaleAttemptError if the edge is already bound in a
        newer attempt.
        """
        current, flow = bound.get(binding.edge), flows.get(binding.edge)
        if current is None or flow is None:
            raise NotFoundError(
                f"step {self.step_id} has no edge {binding.edge} that can be rebound; it has "
                f"{', '.join(flows) or 'none'}",
                reason="UNKNOWN_EDGE",
            )
        attempt, wanted = self._key(current).attempt, self._key(binding).attempt
        if wanted < attempt:
            raise StaleAttemptError(
                f"edge {binding.edge} of step {self.step_id} is bound in attempt {attempt}, newer than {wanted}",
                metadata={"edge": binding.edge, "attempt": str(attempt)},
            )
        return wanted > attempt or flow.is_lost or binding.peer != current.peer


class EdgeInput:
    """The engine's input from one incoming edge. Iterates over the inlet's packets, transformed and validated."""

    def __init__(
        self,
        inlet: Inlet,
        *,
        edge: str,
        transform: "_EdgeTransform | None",
        accepts: Mapping[str, TensorSpec],
        on_packet: Callable[[], None],
    ) -> None:
        self._packets = aiter(inlet)
        self._edge, self._accepts, self._on_packet, self._transform = edge, accepts, on_packet, transform
        self._pending: deque[Packet] = deque()
        self.waits = False
        """Whether the engine is waiting for a packet that has not arrived."""
        self._ended = False

    def __aiter__(self) -> AsyncIterator[Packet]:
        """Returns this object itself, because an input can be read only once."""
        return self

    async def __anext__(self) -> Packet:
        """Returns the next packet. Raises StopAsyncIteration after the last packet.

        This method is used instead of an async generator, because a generator's frame would retain the last packet and
        the packet's lease.
        """
        while not self._pending:
            if self._ended:
                raise StopAsyncIteration
            await self._pull()
        self._on_packet()
        return self._pending.popleft()

    async def _pull(self) -> None:
        self.waits = True
        try:
            packet = await anext(self._packets, None)
        finally:
            self.waits = False
        self._ended = packet is None
        if self._transform is not None:
            made = self._transform.finish() if packet is None else self._transform.push(packet)
        else:
            made = [] if packet is None else [packet]
        self._pending.extend(accepted_part(each, self._accepts, edge=self._edge) for each in made)


def accepted_part(packet: Packet, accepts: Mapping[str, TensorSpec], *, edge: str) -> Packet:
    """Returns a packet that contains only the tensors and tickets that the stage accepts.

    `edge` is the edge's name in errors. Raises InvalidChunkError if the packet contains none of them, or if a dtype, a
    shape or the kind of a ticket does not match. A symbol in the accepted shapes represents the same length in all
    tensors of the packet.
    """
    taken = {name: tensor for name, tensor in packet.tensors.items() if name in accepts}
    tickets = _accepted_tickets(packet, accepts, edge=edge) if packet.tickets else packet.tickets
    if not taken and not tickets:
        names = ", ".join((*packet.tensors, *packet.tickets)) or "no tensor"
        raise InvalidChunkError(
            f"edge {edge} carries {names}; this stage accepts {', '.join(accepts)}", metadata={"edge": edge}
        )
    lengths: dict[str, int] = {}
    for name, tensor in taken.items():
        try:
            accepts[name].check(name, tensor)
            check_lengths(name, tensor, accepts[name], lengths=lengths)
        except InvalidChunkError as exc:
            raise InvalidChunkError(f"edge {edge}: {exc.message}", metadata={"edge": edge}) from exc
    return Packet(taken, packet.metadata, tickets)


def _accepted_tickets(packet: Packet, accepts: Mapping[str, TensorSpec], *, edge: str) -> Mapping[str, Ticket]:
    tickets = {name: ticket for name, ticket in packet.tickets.items() if name in accepts}
    for name, ticket in tickets.items():
        if accepts[name].ticket_kind != ticket.kind:
            raise InvalidChunkError(
                f"edge {edge}: {name!r} is {TensorSpec.ticket(ticket.kind)}; expected {accepts[name]}",
                metadata={"edge": edge},
            )
    return tickets


class _EdgeTransform:
    """The transform of one flow, which passes tickets. Its results are checked by its descriptor.

    An error of the transform names the transform and the edge. The constructor raises NotFoundError if the name is
    unknown.
    """

    def __init__(self, name: str, *, edge: str, model: Path | None, user_errors: UserErrors) -> None:
        descriptor = load_transform_descriptor(name)
        self._name = f"transform {name} of edge {edge}"
        self._module, self._edge, self._user_errors = descriptor.factory, edge, user_errors
        self._results = ResultCheck(descriptor.gives, maker=self._name, metadata={"edge": edge})
        with self._named_errors():
            self._transform: Transform = import_factory(descriptor.factory)(model)

    def push(self, packet: Packet) -> Sequence[Packet]:
        with self._named_errors():
            made = self._transform.push(packet)
        self._check(made)
        return _with_tickets(packet, made) if packet.tickets else made

    def finish(self) -> Sequence[Packet]:
        with self._named_errors():
            made = self._transform.finish()
        self._check(made)
        return made

    def _check(self, made: Sequence[Packet]) -> None:
        if problem := packets_problem(made):
            raise InternalError(
                f"{self._name} returned {problem}; return a list of Packets",
                reason="INVALID_RESULT",
                metadata={"edge": self._edge},
            )
        for packet in made:
            self._results.check(packet)

    @contextmanager
    def _named_errors(self) -> Generator[None]:
        try:
            yield
        except StagemeshError:
            raise
        except (Exception, SystemExit) as exc:
            message = self._user_errors.describe(self._name, exc, module=self._module)
            raise InternalError(message, reason="ENGINE_ERROR", metadata={"edge": self._edge}) from exc


def _with_tickets(packet: Packet, made: Sequence[Packet]) -> Sequence[Packet]:
    """Returns the packets that a transform made of `packet`, the first of which has the tickets of `packet`."""
    if any(each.tickets for each in made):
        return made
    first, *rest = made or [Packet({}, packet.metadata)]
    return [Packet(first.tensors, first.metadata, packet.tickets), *rest]


def _rebind_s(edge: str) -> float:
    return 0.0 if edge == STATE_EDGE else REBIND_S


def _report(peer: str, status: FlowStatus) -> control_pb2.FlowReport:
    fields: dict[str, Any] = asdict(status) | {"connector": number_of(status.connector)}
    return control_pb2.FlowReport(**fields, peer=peer)
