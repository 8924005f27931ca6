"""Running requests, and recently ended requests to which a caller can still attach."""

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
    """A request that a caller can find by its id."""

    fingerprint: bytes
    """The digest of the request's content, as returned by the function `fingerprint`."""
    seed: int
    stop: Callable[[StagemeshError], None]
    """Ends the request with an error. Does nothing if it has ended."""
    record: RequestRecord
    ended: "asyncio.Future[None]"
    """A future that is done when every stage has released the request.

    Several tasks wait for it. They must use `asyncio.wait`, which does not cancel it.
    """


class RequestRegistry:
    """Requests by id.

    An ended request is dropped after `keep_s` seconds. If all ended requests together need more than `keep_bytes`, the
    oldest ended requests are dropped earlier.
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
        """Returns the request with this id, or None if it is unknown or was dropped."""
        return self._running.get(request_id) or self._ended.get(request_id)

    def find_same(self, request_id: str, fingerprint: bytes, *, seed: int | None = None) -> KnownRequest | None:
        """Returns the request with this id, or None if there is none.

        Raises ExistsError (REQUEST_EXISTS) if its content differs, or if `seed` is given and differs from its seed.
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
        """Adds a queued or running request."""
        assert self.find(request_id) is None, "request ids are unique"
        self._running[request_id] = known

    def forget(self, request_id: str) -> None:
        """Drops a request that ended before it ran. If a caller repeats the request, it is started again."""
        del self._running[request_id]

    def end(self, request_id: str) -> None:
        """Records that a request has ended. The request is retained for a limited time."""
        known = self._ended[request_id] = self._running.pop(request_id)
        self._sizes[request_id] = known.record.size_bytes
        self._kept_bytes += known.record.size_bytes
        self._timers[request_id] = asyncio.get_running_loop().call_later(self._keep_s, self._drop, request_id)
        while self._kept_bytes > self._keep_bytes:
            self._drop(next(iter(self._ended)))

    def clear(self) -> None:
        """Drops all requests that have ended."""
        for request_id in list(self._ended):
            self._drop(request_id)

    def _drop(self, request_id: str) -> None:
        del self._ended[request_id]
        self._kept_bytes -= self._sizes.pop(request_id)
        self._timers.pop(request_id).cancel()


def fingerprint(request: orchestrator_pb2.GenerateRequest) -> bytes:
    """Returns a digest of the content that two calls with the same request_id must share.

    The digest excludes the fields that say how the caller continues to read. It also excludes the seed, because a
    caller that returns has learned the seed from its first call.
    """
    content = orchestrator_pb2.GenerateRequest()
    content.CopyFrom(request)
    for name in ("next_seqs", "next_positions", "linger_s", "earlier_calls"):
        content.ClearField(name)
    content.parameters.ClearField("seed")
    if not content.parameters.ByteSize():
        content.ClearField("parameters")
    return hashlib.blake2b(content.SerializeToString(deterministic=True), digest_size=16).digest()
