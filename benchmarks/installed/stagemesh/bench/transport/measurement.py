"""Measures each connector between this process and a peer, one connector after another, and reports the results.

The packets are sent over real flows, as an engine would send them.
"""

import asyncio
import secrets
import statistics
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import NamedTuple, TypeAlias

import grpc
import numpy as np

from stagemesh.bench.transport.peer import ARRIVED, EACH, ENGINE, MIB, SUMMARY, make_plane
from stagemesh.common.errors import InternalError, InvalidRequestError, NotReadyError, StagemeshError, UnavailableError
from stagemesh.common.plugins.connectors import AUTO, GRPC, NIXL, SHM, ConnectorName, descriptors
from stagemesh.common.wire.chunk_sizes import StepPolicy
from stagemesh.common.wire.tensors import read_inline, to_messages
from stagemesh.common.wire.versions import check_version
from stagemesh.connectors.data_plane import DataPlane
from stagemesh.connectors.flow.outlet import Outlet
from stagemesh.connectors.packets import ConsumerAddress, EdgeKey, Packet
from stagemesh.rpc.channels import open_channel
from stagemesh.rpc.error_mapping import from_rpc_error
from stagemesh.v1 import request_pb2, stage_pb2, stage_pb2_grpc

SIZES = (64 << 10, MIB, 16 * MIB)
"""The sizes in bytes of the tensors whose one-way time is measured."""
Progress: TypeAlias = Callable[[str], None]
_Call: TypeAlias = "grpc.aio.UnaryStreamCall[stage_pb2.ExecuteStepRequest, stage_pb2.ExecuteStepResponse]"

EDGE = "probe"
_DESCRIBE_S = 5.0
_STEP_S = 30.0
_WARM_UP = 3
_COUNTS: dict[int, int] = dict(zip(SIZES, (40, 20, 6), strict=True))
_PINGS = 30
_SUSTAINED_S = 0.7
_SUSTAINED_BYTES = MIB
_GB = 1e9


@dataclass(frozen=True)
class ConnectorFigures:
    """The measurement results of one connector.

    If the connector cannot be used, all results have their default values.
    """

    connector: ConnectorName
    refusal: str = ""
    """The reason why the connector cannot be used. Empty if the connector can be used."""
    how: str = ""
    """A human-readable description of the transport, such as "UCX, tcp (no RDMA device)". Empty if there is none."""
    one_way_s: Mapping[int, float] = field(default_factory=dict[int, float])
    """The median time in seconds from sending a tensor to its arrival at the peer, for each tensor size in bytes."""
    bytes_per_s: float = 0.0
    """The sustained rate in bytes per second, measured with tensors of 1 MiB."""
    cpu_s_per_gb: float = 0.0
    """The processor time in seconds that both processes together need to transfer 10^9 bytes."""


@dataclass(frozen=True)
class TransportReport:
    """The measurement results of all connectors between this process and a peer."""

    peer: str
    same_host: bool
    choice: ConnectorName
    """The connector that `connector: auto` selects."""
    passed_over: Mapping[ConnectorName, str]
    """The connectors that are preferred over `choice` but cannot be used, each with the reason. May be empty."""
    clock_error_s: float
    """The maximum error of every one-way time in seconds, caused by the comparison of two clocks. 0 within one host."""
    connectors: tuple[ConnectorFigures, ...]
    """The results of each connector, in descending order of preference."""


async def measure_peer(endpoint: str, *, progress: Progress) -> TransportReport:
    """Measures the connectors to the peer at `endpoint` ("host:port").

    Before each part of the measurement, calls `progress` with a description of the part. Raises InvalidRequestError if
    `endpoint` is not an address. Raises UnavailableError if nothing answers at `endpoint`, and NotReadyError if the
    answering process is not a probe peer or has another version.
    """
    _check_address(endpoint)
    async with open_channel(endpoint) as channel:
        stub = stage_pb2_grpc.StageServiceStub(channel)
        progress(f"identifying {endpoint}")
        peer = await _describe(stub, endpoint)
        replica = f"prober-{secrets.token_hex(4)}"
        plane = make_plane(replica)
        try:
            return await _Prober(stub, plane, replica, endpoint, peer.replica, progress).measure()
        finally:
            await plane.close()


class _Trip(NamedTuple):
    """The times at which one packet was sent, arrived, and was reported as arrived, in nanoseconds."""

    sent_ns: int
    arrived_ns: int
    """The time of the packet's arrival at the peer, measured by the peer's clock."""
    reported_ns: int
    """The time at which this process received the peer's report of the arrival."""


class _Step(NamedTuple):
    """An open flow to the peer, and the ExecuteStep RPC of the peer's step that receives this flow."""

    outlet: Outlet
    call: _Call

    async def output(self, name: str) -> list[int]:
        """Returns the values of the step's next output. Raises InternalError if the output's name is not `name`."""
        response = await self.call.read()
        if not isinstance(response, stage_pb2.ExecuteStepResponse) or response.output.name != name:
            raise InternalError(f"the peer did not send the output {name}")
        return [int(number) for number in read_inline(response.output.tensor)]


@dataclass
class _Prober:
    """Measures all connectors to one peer. Create a new object for each measurement."""

    _stub: "stage_pb2_grpc.StageServiceAsyncStub"
    _plane: DataPlane
    _replica: str
    _endpoint: str
    _peer: str
    _progress: Progress
    _same_host: bool = False
    _ahead_ns: int = 0
    """The difference between the clocks in nanoseconds: the peer's clock minus this process's clock."""

    async def measure(self) -> TransportReport:
        """Measures every connector. The report also names the connector that `auto` selects."""
        found = await self._plane.probe(ConsumerAddress(self._peer, self._endpoint), AUTO)
        self._same_host = await self._refusal(SHM) == ""
        clock_error_s = 0.0 if self._same_host else await self._compare_clocks()
        figures = [await self._figures(name) for name in descriptors()]
        return TransportReport(
            peer=self._endpoint,
            same_host=self._same_host,
            choice=found.connector,
            passed_over={name: error.message for name, error in found.refusals.items()},
            clock_error_s=clock_error_s,
            connectors=tuple(figures),
        )

    async def _refusal(self, name: ConnectorName) -> str:
        """Returns the reason why a connector cannot be used, or "" if the connector can be used."""
        try:
            await self._plane.probe(ConsumerAddress(self._peer, self._endpoint), name)
        except StagemeshError as exc:
            return exc.__cause__.message if isinstance(exc.__cause__, StagemeshError) else exc.message
        return ""

    async def _figures(self, name: ConnectorName) -> ConnectorFigures:
        self._progress(f"measuring {name}")
        refusal = await self._refusal(name)
        if refusal:
            return ConnectorFigures(name, refusal=refusal)
        try:
            one_way_s = {size: await self._one_way_s(name, size) for size in SIZES}
            bytes_per_s, cpu_s_per_gb = await self._sustained(name)
        except StagemeshError as exc:
            return ConnectorFigures(name, refusal=f"it failed during the measurement: {exc.message}")
        return ConnectorFigures(
            name, how=self._how(name), one_way_s=one_way_s, bytes_per_s=bytes_per_s, cpu_s_per_gb=cpu_s_per_gb
        )

    def _how(self, name: ConnectorName) -> str:
        if name == NIXL:
            from stagemesh.connectors.nixl.environment import describe

            return f"UCX within the host; between hosts {describe()}" if self._same_host else f"UCX, {describe()}"
        return {SHM: "read in place", GRPC: "bytes in the gRPC stream"}.get(name, "")

    async def _one_way_s(self, name: ConnectorName, size_bytes: int) -> float:
        """Returns the median one-way time in seconds of tensors of `size_bytes` bytes. Sends one tensor at a time."""
        trips = await self._trips(name, size_bytes, count=_WARM_UP + _COUNTS[size_bytes])
        return statistics.median(trip.arrived_ns - self._ahead_ns - trip.sent_ns for trip in trips[_WARM_UP:]) / 1e9

    async def _trips(self, name: ConnectorName, size_bytes: int, *, count: int) -> list[_Trip]:
        """Sends `count` tensors of `size_bytes` bytes, one at a time. Returns the times of each tensor."""
        packet = Packet({"x": np.ones(size_bytes, np.uint8)})
        trips: list[_Trip] = []
        async with self._step(name, each=True) as step:
            for _ in range(count):
                sent_ns = time.monotonic_ns()
                await step.outlet.send(packet)
                [arrived_ns] = await step.output(ARRIVED)
                trips.append(_Trip(sent_ns, arrived_ns, time.monotonic_ns()))
            await step.outlet.finish()
            await step.output(SUMMARY)
        return trips

    async def _sustained(self, name: ConnectorName) -> tuple[float, float]:
        """Sends tensors of 1 MiB without pauses. Returns the rate and the processor time.

        The rate is in bytes per second. The processor time is the total of both processes, in seconds per 10^9 bytes.
        """
        packet = Packet({"x": np.ones(_SUSTAINED_BYTES, np.uint8)})
        async with self._step(name, each=False) as step:
            used_ns, began_ns, count = time.process_time_ns(), time.monotonic_ns(), 0
            while time.monotonic_ns() - began_ns < _SUSTAINED_S * 1e9:
                await step.outlet.send(packet)
                count += 1
            await step.outlet.finish()
            arrived_ns, used_there_ns = await step.output(SUMMARY)
        used_s = (time.process_time_ns() - used_ns + used_there_ns) / 1e9
        took_s = (arrived_ns - self._ahead_ns - began_ns) / 1e9
        return count * _SUSTAINED_BYTES / took_s, used_s / (count * _SUSTAINED_BYTES / _GB)

    async def _compare_clocks(self) -> float:
        """Measures the difference between both processes' clocks. Returns the maximum error of the result in seconds.

        A packet arrives at the peer after this process has sent the packet, and before this process receives the peer's
        report. The fastest round trip therefore determines the difference with the smallest error.
        """
        self._progress("comparing clocks")
        trips = await self._trips(GRPC, 1, count=_PINGS)
        fastest = min(trips, key=lambda trip: trip.reported_ns - trip.sent_ns)
        self._ahead_ns = fastest.arrived_ns - (fastest.sent_ns + fastest.reported_ns) // 2
        return (fastest.reported_ns - fastest.sent_ns) / 2e9

    @asynccontextmanager
    async def _step(self, name: ConnectorName, *, each: bool) -> AsyncGenerator[_Step]:
        """Starts a step at the peer. Yields a flow to this step over the connector `name`.

        `each` is whether the step reports the arrival of each packet immediately.
        """
        key = EdgeKey(f"probe-{secrets.token_hex(8)}", EDGE, 1)
        call = self._stub.ExecuteStep(
            stage_pb2.ExecuteStepRequest(
                request_id=key.request_id,
                step_id=key.request_id,
                attempt=key.attempt,
                inputs=[stage_pb2.InputBinding(edge=key.edge, producer=self._replica, attempt=1)],
                parameters=request_pb2.StageParameters(options=to_messages({EACH: each})),
            ),
            timeout=_STEP_S,
        )
        try:
            await call.read()
            outlet = self._plane.open_outlet(
                key, ConsumerAddress(self._peer, self._endpoint), connector=name, policy=StepPolicy()
            )
            async with asyncio.timeout(_STEP_S):
                yield _Step(outlet, call)
        except grpc.aio.AioRpcError as exc:
            raise from_rpc_error(exc, peer=self._endpoint) from exc
        except TimeoutError:
            raise UnavailableError(f"no further packet arrived within {_STEP_S:g} s", reason="NO_ANSWER") from None
        finally:
            call.cancel()


def _check_address(endpoint: str) -> None:
    host, _, port = endpoint.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise InvalidRequestError(
            f"{endpoint!r} is not an address; write one like 10.0.0.2:7790", reason="INVALID_ADDRESS"
        )


async def _describe(stub: "stage_pb2_grpc.StageServiceAsyncStub", endpoint: str) -> stage_pb2.DescribeResponse:
    """Returns the peer's description.

    Raises UnavailableError if nothing answers at `endpoint`, and NotReadyError if the answering service is not a probe
    peer of this version.
    """
    try:
        peer = await stub.Describe(stage_pb2.DescribeRequest(), timeout=_DESCRIBE_S)
    except grpc.aio.AioRpcError as exc:
        if exc.code() is grpc.StatusCode.UNIMPLEMENTED:
            raise _no_peer(endpoint, "another gRPC service") from exc
        raise UnavailableError(
            f"nothing answers at {endpoint} ({exc.details() or exc.code().name}); run `stagemesh probe-transport "
            f"--serve {endpoint}` there, and check that no firewall blocks the port",
            reason="PEER_UNREACHABLE",
        ) from exc
    if peer.engine != ENGINE:
        raise _no_peer(endpoint, f"replica {peer.replica} of pipeline {peer.pipeline}")
    check_version(peer.protocol, peer=endpoint, own_name="this host")
    if peer.generation != (ours := version("stagemesh")):
        raise NotReadyError(
            f"{endpoint} runs Stagemesh {peer.generation}, this host {ours}; install the same on both",
            reason="WRONG_VERSION",
        )
    return peer


def _no_peer(endpoint: str, what: str) -> NotReadyError:
    return NotReadyError(
        f"{endpoint} is {what}, which is not measured; run `stagemesh probe-transport --serve HOST:PORT` there with a "
        "free port, and give that address here",
        reason="NO_PEER",
    )
