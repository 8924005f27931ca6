"""The requests that run, and those that ended a moment ago and can still be attached to."""

import asyncio
import hashlib
from collections import OrderedDict
from dataclasses import dataclass
from typing import Protocol

from stagemesh.common.errors import ExistsError, StagemeshError
from stagemesh.orchestrator.request.callers import Callers
from stagemesh.orchestrator.request.record import RequestRecord
from stagemesh.v1 import orchestrator_pb2

KEEP_S = 30.0
KEEP_BYTES = 64 << 20


class Stoppable(Protocol):
    """What can be told to end, harmlessly also when it has ended."""

    def stop(self, error: StagemeshError) -> None:
        """Has it end with this error."""


@dataclass(frozen=True)
class KnownRequest:
    """A request by its id."""

    fingerprint: bytes
    seed: int
    """The one in force."""
    run: Stoppable
    record: RequestRecord
    callers: Callers
    ended: "asyncio.Future[None]"
    """Done once every stage has let go of it. Others wait for it, too: `asyncio.wait` cancels it for nobody."""


class RequestTable:
    """Requests by id. Ended ones go after `keep_s`, or sooner where they hold more than `keep_bytes`, oldest first."""

    def __init__(self, *, keep_s: float = KEEP_S, keep_bytes: int = KEEP_BYTES) -> None:
        self._keep_s = keep_s
        self._keep_bytes = keep_bytes
        self._running: dict[str, KnownRequest] = {}
        self._ended = OrderedDict[str, KnownRequest]()
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._sizes: dict[str, int] = {}
        self._kept_bytes = 0

    def find(self, request_id: str) -> KnownRequest | None:
        """The request of this id, running or kept."""
        return self._running.get(request_id) or self._ended.get(request_id)

    def find_same(self, request_id: str, fingerprint: bytes, *, seed: int | None = None) -> KnownRequest | None:
        """The request of this id; raises ExistsError (REQUEST_EXISTS) when its content or its seed is another."""
        known = self.find(request_id)
        if known is not None and (known.fingerprint != fingerprint or seed not in (None, known.seed)):
            raise ExistsError(
                f"request {request_id!r} exists with other content; use another request_id",
                reason="REQUEST_EXISTS",
                metadata={"request_id": request_id},
            )
        return known

    @property
    def running(self) -> tuple[KnownRequest, ...]:
        """Those that have not ended, whether they run or wait."""
        return tuple(self._running.values())

    def add(self, request_id: str, known: KnownRequest) -> None:
        """A request waits or runs from now on."""
        assert self.find(request_id) is None, "request ids are unique"
        self._running[request_id] = known

    def forget(self, request_id: str) -> None:
        """A request has ended before it ran: who comes again is to try anew."""
        del self._running[request_id]

    def end(self, request_id: str) -> None:
        """A request has ended; it is kept for a while."""
        known = self._ended[request_id] = self._running.pop(request_id)
        self._sizes[request_id] = known.record.size_bytes
        self._kept_bytes += known.record.size_bytes
        self._timers[request_id] = asyncio.get_running_loop().call_later(self._keep_s, self._drop, request_id)
        while self._kept_bytes > self._keep_bytes:
            self._drop(next(iter(self._ended)))

    def clear(self) -> None:
        """Forgets what ended."""
        for request_id in list(self._ended):
            self._drop(request_id)

    def _drop(self, request_id: str) -> None:
        del self._ended[request_id]
        self._kept_bytes -= self._sizes.pop(request_id)
        self._timers.pop(request_id).cancel()


def fingerprint(request: orchestrator_pb2.GenerateRequest) -> bytes:
    """What two calls with one request_id must agree in: all but how the caller goes on reading, and the seed, which one
    that comes again knows from the first call.
    """
    content = orchestrator_pb2.GenerateRequest()
    content.CopyFrom(request)
    for name in ("next_seqs", "next_positions", "linger_s", "earlier_calls"):
        content.ClearField(name)
    content.parameters.ClearField("seed")
    if not content.parameters.ByteSize():
        content.ClearField("parameters")
    return hashlib.blake2b(content.SerializeToString(deterministic=True), digest_size=16).digest()
