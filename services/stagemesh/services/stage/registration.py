"""Registration of a replica with the orchestrators that its config names, and renewal of the registrations."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import TypeAlias

import grpc

from stagemesh.common.backoff import Backoff
from stagemesh.common.errors import DeadlineError, InvalidRequestError, StagemeshError, UnavailableError
from stagemesh.common.process.stage_process import OrchestratorAddress, StageConfig
from stagemesh.common.tasks import wait_within
from stagemesh.common.wire.encoding import to_message
from stagemesh.common.wire.versions import OFFERS, check_version, own_protocol
from stagemesh.rpc.channels import open_channel
from stagemesh.rpc.error_mapping import from_rpc_error
from stagemesh.v1 import membership_pb2, membership_pb2_grpc

_Call: TypeAlias = "grpc.aio.StreamStreamCall[membership_pb2.RegisterRequest, membership_pb2.RegisterResponse]"

_log = logging.getLogger(__name__)

_RENEWALS = 3
"""The number of times that a replica renews its registration within the duration of the registration's lease."""
_PAUSES = Backoff(first_s=0.2, longest_s=2.0)
_REJECTED_PAUSE_S = 10.0
_DEREGISTER_S = 1.0
_ANYWHERE = frozenset({"", "0.0.0.0", "[::]", "*"})  # noqa: S104


@asynccontextmanager
async def registered(config: StageConfig, *, incarnation: str, port: int) -> AsyncGenerator[None]:
    """Keeps the replica registered with its orchestrators until the context exits, then deregisters the replica.

    `incarnation` identifies this start of the replica. `port` is the port of the replica's server. Raises
    InvalidRequestError (INVALID_CONFIG) if other hosts cannot reach the configured address.
    """
    if not config.orchestrators:
        yield
        return
    identity = to_message(
        membership_pb2.ReplicaIdentity,
        config,
        protocol=own_protocol(OFFERS),
        incarnation=incarnation,
        endpoint=_advertised(config, port),
    )
    leaving = asyncio.Event()
    failure: Exception | None = None
    async with asyncio.TaskGroup() as group:
        registrations = {
            group.create_task(Registration(orchestrator, identity, leaving).run()): orchestrator.endpoint
            for orchestrator in config.orchestrators
        }
        try:
            yield
        except Exception as exc:  # noqa: BLE001
            # The error is raised below. The group would wrap it, and would cancel registrations that are deregistering.
            failure = exc
        finally:
            leaving.set()
            _, late = await asyncio.wait(registrations, timeout=_DEREGISTER_S)
            for task in late:
                _log.warning("orchestrator %s did not confirm that this replica deregistered", registrations[task])
                task.cancel()
    if failure is not None:
        raise failure


class Registration:
    """Keeps the replica registered with one orchestrator until the event `leaving` is set."""

    def __init__(
        self, orchestrator: OrchestratorAddress, identity: membership_pb2.ReplicaIdentity, leaving: asyncio.Event
    ) -> None:
        self._orchestrator, self._server_name = orchestrator.endpoint, orchestrator.server_name
        self._identity, self._leaving = identity, leaving
        self._retries = _PAUSES.retries()
        self._pause_s = _PAUSES.first_s
        self._registered, self._last_failure = False, ""

    async def run(self) -> None:
        """Registers the replica. After each error, pauses and then registers the replica again.

        After `leaving` is set, deregisters the replica and returns.
        """
        while not self._leaving.is_set():
            try:
                # A channel of its own for each registration uses renewed certificates.
                async with open_channel(self._orchestrator, server_name=self._server_name, keepalive_s=20) as channel:
                    await self._stay_registered(membership_pb2_grpc.MembershipServiceStub(channel))
            except StagemeshError as exc:
                self._note_failure(exc)
            await wait_within(self._pause_s, self._leaving.wait())

    async def _stay_registered(self, stub: "membership_pb2_grpc.MembershipServiceAsyncStub") -> None:
        """Registers the replica and renews the registration until `leaving` is set, then deregisters the replica.

        Raises a StagemeshError if the orchestrator rejects or ends the registration, or is unreachable.
        """
        call = stub.Register()
        woken = asyncio.Event()
        call.add_done_callback(lambda _: woken.set())
        leaving = asyncio.ensure_future(self._leaving.wait())
        leaving.add_done_callback(lambda _: woken.set())
        try:
            await call.write(membership_pb2.RegisterRequest(replica=self._identity))
            while isinstance(answer := await call.read(), membership_pb2.RegisterResponse):
                check_version(
                    answer.protocol,
                    peer=f"orchestrator {self._orchestrator}",
                    own_name=f"replica {self._identity.replica}",
                )
                self._note_registered()
                await wait_within(answer.lease_s / _RENEWALS, woken.wait())
                if self._leaving.is_set():
                    await _deregister(call)
                    return
                if not call.done():
                    await call.write(membership_pb2.RegisterRequest())
            raise UnavailableError(
                f"orchestrator {self._orchestrator} ended the registration", reason="CONNECTION_LOST"
            )
        except grpc.aio.AioRpcError as exc:
            raise from_rpc_error(exc, peer=f"orchestrator {self._orchestrator}") from exc
        finally:
            leaving.cancel()
            call.cancel()

    def _note_registered(self) -> None:
        if not self._registered:
            _log.info("registered with orchestrator %s", self._orchestrator)
        self._registered, self._last_failure, self._pause_s = True, "", _PAUSES.first_s
        self._retries.reset()

    def _note_failure(self, error: StagemeshError) -> None:
        """Logs a registration error if its message differs from the previous error's, and sets the pause before the
        replica registers again.

        The pause is longer if the orchestrator has rejected the registration.
        """
        self._registered = False
        rejected = not isinstance(error, UnavailableError | DeadlineError) and error.reason != "LEASE_ENDED"
        self._pause_s = _REJECTED_PAUSE_S if rejected else self._retries.next_s()
        if error.message != self._last_failure:
            level = logging.ERROR if rejected else logging.WARNING
            _log.log(level, "not registered with orchestrator %s: %s", self._orchestrator, error.message)
        self._last_failure = error.message


async def _deregister(call: _Call) -> None:
    """Ends the stream of registration messages, and waits until the orchestrator has also ended the stream."""
    with contextlib.suppress(grpc.aio.AioRpcError):
        await call.done_writing()
        while await call.read() is not grpc.aio.EOF:
            pass


def _advertised(config: StageConfig, port: int) -> str:
    host, _, wanted = (config.advertise or config.listen).rpartition(":")
    if host in _ANYWHERE:
        raise InvalidRequestError(
            f"replica {config.replica} must register but listens on {config.listen}, which other hosts cannot reach; "
            'set `advertise` to "host:port" in its config',
            reason="INVALID_CONFIG",
        )
    return f"{host}:{port if wanted == '0' else wanted}"
