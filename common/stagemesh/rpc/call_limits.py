"""Limits the calls of a caller: their number, the content of their messages, and the messages that are rejected."""

import time
from collections.abc import AsyncIterator
from typing import Any

from google.protobuf.message import DecodeError, Message

from stagemesh.common.errors import InvalidRequestError, OverloadedError
from stagemesh.common.wire.encoding import count_fields, parse_message
from stagemesh.rpc.channels import MAX_FIELDS

CALLS_PER_CALLER = 4096
_FIELD_BYTES, _FREE_BYTES = 512, 64 << 10


class RejectedBytes:
    """Counts the bytes of rejected messages by caller. Each caller may send 8 MiB/s of them, and 32 MiB at once.

    A rejected message costs its sender nothing, but takes time from all callers: at this rate, about a twentieth.
    A caller that has sent more waits for at most 4 s: others may use the same credentials.
    """

    _BYTES_A_SECOND, _AT_ONCE_S, _MAX_IDLE = 8 << 20, 4.0, 1024

    def __init__(self) -> None:
        self._paid_s: dict[str, float] = {}
        """The time from which nothing of the caller counts any longer. Earlier times are removed now and then."""

    def over_s(self, caller: str) -> float:
        """Returns the time for which a caller must not send messages, in seconds. 0 or less if it may."""
        return self._paid_s.get(caller, 0.0) - time.monotonic() - self._AT_ONCE_S

    def add(self, caller: str, size_bytes: int) -> None:
        """Counts bytes for a caller."""
        now_s = time.monotonic()
        if len(self._paid_s) > self._MAX_IDLE:
            self._paid_s = {name: paid_s for name, paid_s in self._paid_s.items() if paid_s > now_s}
        paid_s = max(self._paid_s.get(caller, 0.0), now_s) + size_bytes / self._BYTES_A_SECOND
        self._paid_s[caller] = min(paid_s, now_s + 2 * self._AT_ONCE_S)


class Messages(AsyncIterator[Any]):
    """The messages of an RPC, which are received and parsed one at a time.

    Raises InvalidRequestError (MALFORMED_MESSAGE, MESSAGE_TOO_LARGE), or OverloadedError (CALL_LIMIT) if too many of
    the caller's messages were rejected.
    """

    def __init__(
        self, received: AsyncIterator[bytes], kind: type[Message] | None, rejected: RejectedBytes, caller: str
    ) -> None:
        """`kind` is the type of the messages, or None if they remain bytes."""
        self._received, self._kind, self._rejected, self._caller = received, kind, rejected, caller
        self._newest: Message | bytes = b""

    async def __anext__(self) -> Any:
        if (over_s := self._rejected.over_s(self._caller)) > 0:
            problem = "too many large messages of the caller were rejected; correct them, and retry later"
            raise OverloadedError(problem, reason="CALL_LIMIT", retry_after_s=over_s)
        data = await anext(aiter(self._received))
        if self._kind is None:
            return data
        self._newest = data
        self._newest = parse_message(self._kind, data, max_fields=MAX_FIELDS)
        return self._newest

    def reject(self) -> None:
        """Counts the newest message as rejected. Small messages with few fields are free.

        A field counts as 512 bytes, which take about as much time as one turn of Python's loops over fields.
        """
        newest, self._newest = self._newest, b""
        data = newest if isinstance(newest, bytes) else newest.SerializeToString()
        try:
            fields = count_fields(data, self._kind, most=MAX_FIELDS) if self._kind is not None else 0
        except (DecodeError, InvalidRequestError):
            fields = min(len(data), MAX_FIELDS)
        self._rejected.add(self._caller, max(0, len(data) + _FIELD_BYTES * fields - _FREE_BYTES))
