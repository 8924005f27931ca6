"""Tells the orchestrators that the config names that this replica is there, and keeps telling them."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import TypeAlias

import grpc

from stagemesh.common.backoff import Backoff
from stagemesh.common.errors import DeadlineError, InvalidRequestError, StagemeshError, UnavailableError
from stagemesh.common.stage_config import StageConfig
from stagemesh.common.versions import WIRE_VERSION
from stagemesh.rpc.channels import open_channel
from stagemesh.rpc.error_mapping import from_rpc_error
from stagemesh.v1 import membership_pb2, membership_pb2_grpc

_Call: TypeAlias = "grpc.aio.StreamStreamCall[membership_pb2.RegisterRequest, membership_pb2.RegisterResponse]"

_log = logging.getLogger(__name__)

_RENEWALS = 3
"""In the time of a lease."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 2.0
_REFUSED_PAUSE_S = 10.0
_GOODBYE_S = 1.0
_PASSING = frozenset({"NOT_RUNNING", "LEASE_ENDED"})
"""Reasons why an orchestrator has it register again, at once."""
_ANYWHERE = frozenset({"", "0.0.0.0", "[::]", "*"})  # noqa: S104


@asynccontextmanager
async def registered(config: StageConfig, *, incarnation: str, port: int) -> AsyncGenerator[None]:
    """Keeps the replica registered within the block, and takes it off the orchestrators' lists at its end.

    `port` is the one it listens on. Raises InvalidRequestError (INVALID_CONFIG) where no address to advertise is known.
    """
    if not config.orchestrators:
        yield
        return
    who = membership_pb2.ReplicaIdentity(
        wire_version=WIRE_VERSION,
        pipeline=config.pipeline,
        generation=config.generation,
        stage=config.stage,
        replica=config.replica,
        incarnation=incarnation,
        endpoint=_advertised(config, port),
    )
    registrars = [Registration(orchestrator, who) for orchestrator in config.orchestrators]
    failure: Exception | None = None
    async with asyncio.TaskGroup() as group:
        for registrar in registrars:
            group.create_task(registrar.run(), name=f"register with {registrar.orchestrator}")
        try:
            yield
        except Exception as exc:  # noqa: BLE001
            # Raised below: the group would wrap it, and cancel those who are about to leave.
            failure = exc
        finally:
            for registrar in registrars:
                registrar.leave()
    if failure is not None:
        raise failure


class Registration:
    """Keeps one replica registered with one orchestrator, until it is told to leave."""

    def __init__(self, orchestrator: str, who: membership_pb2.ReplicaIdentity) -> None:
        self.orchestrator = orchestrator
        self._who = who
        self._leaving = asyncio.Event()
        self._bound: asyncio.Timeout | None = None
        """Of the registration that is held."""
        self._backoff = Backoff(first_s=_FIRST_PAUSE_S, longest_s=_LONGEST_PAUSE_S)
        self._pause_s = _FIRST_PAUSE_S
        self._registered, self._complaint = False, ""

    def leave(self) -> None:
        """Has `run` take the replica off the list and return."""
        if not self._leaving.is_set():
            self._leaving.set()
            if self._bound is not None:
                self._bound.reschedule(asyncio.get_running_loop().time() + _GOODBYE_S)

    async def run(self) -> None:
        """Registers, and again whenever that is lost; returns, within a second, once it has left."""
        async with open_channel(self.orchestrator, keepalive_s=20) as channel:
            stub = membership_pb2_grpc.MembershipServiceStub(channel)
            while not self._leaving.is_set():
                try:
                    async with asyncio.timeout(None) as self._bound:
                        await self._hold(stub)
                except TimeoutError:
                    _log.warning("orchestrator %s was silent when this replica left", self.orchestrator)
                except StagemeshError as exc:
                    self._note_failure(exc)
                finally:
                    self._bound = None
                await self._pause()

    async def _hold(self, stub: "membership_pb2_grpc.MembershipServiceAsyncStub") -> None:
        """Is registered, until that is lost or the replica leaves; raises why it was refused or lost."""
        call = stub.Register()
        woken = asyncio.Event()
        call.add_done_callback(lambda _: woken.set())
        leaving = asyncio.ensure_future(self._leaving.wait())
        leaving.add_done_callback(lambda _: woken.set())
        try:
            await call.write(membership_pb2.RegisterRequest(replica=self._who))
            while isinstance(answer := await call.read(), membership_pb2.RegisterResponse):
                self._note_registered()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(woken.wait(), answer.lease_s / _RENEWALS)
                if self._leaving.is_set():
                    await _say_goodbye(call)
                    return
                if not call.done():
                    await call.write(membership_pb2.RegisterRequest())
            raise UnavailableError(f"orchestrator {self.orchestrator} ended the registration")
        except grpc.aio.AioRpcError as exc:
            raise from_rpc_error(exc, peer=f"orchestrator {self.orchestrator}") from exc
        finally:
            leaving.cancel()
            call.cancel()

    def _note_registered(self) -> None:
        if not self._registered:
            _log.info("registered with orchestrator %s", self.orchestrator)
        self._registered, self._complaint, self._pause_s = True, "", _FIRST_PAUSE_S
        self._backoff.reset()

    def _note_failure(self, error: StagemeshError) -> None:
        """Says once why it is not registered; an orchestrator that refuses it is asked again only now and then."""
        self._registered = False
        refused = not isinstance(error, UnavailableError | DeadlineError) and error.reason not in _PASSING
        self._pause_s = _REFUSED_PAUSE_S if refused else self._backoff.next_s()
        if error.message != self._complaint:
            level = logging.ERROR if refused else logging.WARNING
            _log.log(level, "not registered with orchestrator %s: %s", self.orchestrator, error.message)
        self._complaint = error.message

    async def _pause(self) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._leaving.wait(), self._pause_s)


async def _say_goodbye(call: _Call) -> None:
    """Ends our side, and waits a moment for the orchestrator to have taken that in."""
    with contextlib.suppress(grpc.aio.AioRpcError):
        await call.done_writing()
        while await call.read() is not grpc.aio.EOF:
            pass


def _advertised(config: StageConfig, port: int) -> str:
    host, _, wanted = (config.advertise or config.listen).rpartition(":")
    if host in _ANYWHERE:
        raise InvalidRequestError(
            f"replica {config.replica} listens on {config.listen}, where nobody can reach it by that name, and is to "
            'register: set `advertise` to "host:port" in its config',
            reason="INVALID_CONFIG",
        )
    return f"{host}:{port if wanted == '0' else wanted}"
