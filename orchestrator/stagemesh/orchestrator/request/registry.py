"""Registry of running requests, and of recently ended requests to which a caller can still attach."""

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from stagemesh.common.errors import ExistsError, StagemeshError
from stagemesh.orchestrator.request.record import RequestRecord
from stagemesh.v1 import orchestrator_pb2

KEEP_S = 30.0
KEEP_BYTES = 64 << 20


@dataclass(frozen=True)
class KnownRequest:
    """A running or ended request in the registry."""

    fingerprint: bytes
    """The digest of the request's content, computed by the function `fingerprint`."""
    seed: int
    stop: Callable[[StagemeshError], None]
    """Stops the request, which then fails with the given error. Does nothing if the request has ended."""
    record: RequestRecord
    ended: "asyncio.Future[None]"
    """A future that is done when every stage has released the request.

    Several tasks wait for the future. They must use `asyncio.wait`, which does not cancel it.
    """


class RequestRegistry:
    """Finds requests by id.

    An ended request is dropped after `keep_s` seconds. The oldest ended requests are dropped earlier if the records of
    all ended requests together exceed `keep_bytes`.
    """

    def __init__(self, *, keep_s: float = KEEP_S, keep_bytes: int = KEEP_BYTES) -> None:
        self._keep_s = keep_s
        self._keep_bytes = keep_bytes
        self._running: dict[str, KnownRequest] = {}
        self._ended = OrderedDict[str, KnownRequest]()
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._sizes: dict[str, int] = {}
        self._kept_bytes = 0

    @property
    def running(self) -> tuple[KnownRequest, ...]:
        """The requests that have not ended, including queued requests."""
        return tuple(self._running.values())

    def find(self, request_id: str) -> KnownRequest | None:
        """Returns the request with this id, or None if the id is unknown or its request was dropped."""
        return self._running.get(request_id) or self._ended.get(request_id)

    def find_same(self, request_id: str, fingerprint: bytes, *, seed: int | None = None) -> KnownRequest | None:
        """Returns the request with this id, or None if there is none.

        Raises ExistsError (REQUEST_EXISTS) if the known request has another fingerprint, or another seed than `seed`. A
        `seed` of None matches any seed.
        """
        known = self.find(request_id)
        if known is not None and (known.fingerprint != fingerprint or seed not in (None, known.seed)):
            raise ExistsError(
                f"request {request_id!r} already exists with different content; use another request_id",
                reason="REQUEST_EXISTS",
                metadata={"request_id": request_id},
            )
        return known

    def add(self, request_id: str, known: KnownRequest) -> None:
        """Adds a queued or running request. Its id must be unknown."""
        assert self.find(request_id) is None, "request ids are unique"
        self._running[request_id] = known

    def forget(self, request_id: str) -> None:
        """Drops a request that ended before it ran, so that a repeated call starts it again."""
        del self._running[request_id]

    def end(self, request_id: str) -> None:
        """Moves a running request to the ended requests, which are retained for a limited time."""
        known = self._ended[request_id] = self._running.pop(request_id)
        self._sizes[request_id] = known.record.size_bytes
        self._kept_bytes += known.record.size_bytes
        self._timers[request_id] = asyncio.get_running_loop().call_later(self._keep_s, self._drop, request_id)
        while self._kept_bytes > self._keep_bytes:
            self._drop(next(iter(self._ended)))

    def clear(self) -> None:
        """Drops all ended requests."""
        for request_id in list(self._ended):
            self._drop(request_id)

    def _drop(self, request_id: str) -> None:
        del self._ended[request_id]
        self._kept_bytes -= self._sizes.pop(request_id)
        self._timers.pop(request_id).cancel()


def fingerprint(request: orchestrator_pb2.GenerateRequest) -> bytes:
    """Returns a digest of the request's content. Calls with the same request_id must have the same digest.

    The digest excludes the fields that control from where a caller reads the events. It also excludes the seed, because
    a caller that attaches again may set the seed that was chosen for its first call.
    """
    content = orchestrator_pb2.GenerateRequest()
    content.CopyFrom(request)
    for name in ("next_seqs", "next_positions", "linger_s", "earlier_calls"):
        content.ClearField(name)
    content.parameters.ClearField("seed")
    if not content.parameters.ByteSize():
        content.ClearField("parameters")
    return hashlib.blake2b(content.SerializeToString(deterministic=True), digest_size=16).digest()
