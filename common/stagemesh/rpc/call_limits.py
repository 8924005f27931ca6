"""Limits the calls of a caller: how many run at once, the size of their headers, and the content of their messages."""

from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Self

import grpc
from google.protobuf.message import DecodeError, Message

from stagemesh.common.errors import Code, InvalidRequestError, OverloadedError, StagemeshError
from stagemesh.common.wire.encoding import count_fields, parse_message
from stagemesh.rpc.callers import caller_key
from stagemesh.rpc.channels import MAX_FIELDS, MAX_HEADER_BYTES
from stagemesh.rpc.interceptors import Interceptor, Metadata, RejectedBytes, abort, wrap_handler

CALLS_PER_CALLER = 4096
_RETRY_AFTER_S = 1.0
_FIELD_BYTES, _FREE_BYTES = 512, 64 << 10
_FAULTS = {Code.INVALID_ARGUMENT, Code.ALREADY_EXISTS, Code.PERMISSION_DENIED, Code.UNIMPLEMENTED}
"""The codes of errors that are due to the caller's message. The others may be due to the state of the service."""


class CallLimits(Interceptor):
    """Ends each RPC with RESOURCE_EXHAUSTED whose headers are too large, or whose caller has too many running RPCs.

    gRPC itself limits headers only on connections whose peer has acknowledged its settings, and it limits the calls of
    a connection, but not the calls of a caller, who can open many connections.

    A call counts from its headers on, although its request may never arrive. The caller is the first name in the
    certificate, or else the host.
    """

    def __init__(self, calls_per_caller: int | None) -> None:
        """`calls_per_caller` is the number of calls, or None for no limit."""
        super().__init__()
        self._most = calls_per_caller
        self._running = Counter[str]()

    def _refusal(self, details: grpc.HandlerCallDetails) -> StagemeshError | None:
        headers: Metadata = details.invocation_metadata
        if sum(len(name) + len(value) for name, value in headers or ()) <= MAX_HEADER_BYTES:
            return None
        return OverloadedError(
            f"the headers of the call exceed {MAX_HEADER_BYTES} bytes; send fewer or shorter ones",
            reason="HEADERS_TOO_LARGE",
        )

    def _wrapped(self, handler: Any, details: grpc.HandlerCallDetails) -> Any:  # noqa: ARG002
        return handler if self._most is None else wrap_handler(handler, partial(self._counted, self._most))

    @asynccontextmanager
    async def _counted(self, most: int, requests: AsyncIterator[bytes], context: Any) -> AsyncGenerator[Any]:
        """Counts an RPC within the block, and ends it if its caller has too many. Yields `requests`."""
        caller = _caller(context)
        self._running[caller] += 1
        try:
            if self._running[caller] > most:
                error = OverloadedError(
                    f"the caller has {most} running calls, which is the most that this service accepts; end some, and "
                    "retry",
                    reason="CALL_LIMIT",
                    retry_after_s=_RETRY_AFTER_S,
                )
                await abort(context, error)
            yield requests
        finally:
            self._running[caller] -= 1
            if not self._running[caller]:
                del self._running[caller]


class Messages:
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

    def __aiter__(self) -> Self:
        return self

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


class MessageLimits(Interceptor):
    """Receives and parses the messages of each RPC, and ends the RPC if they are malformed or exceed a limit.

    It must be the last interceptor. Messages of callers that other interceptors reject are then not parsed. Handlers
    that receive a stream are passed `Messages`. Handlers that receive a stream of bytes are passed gRPC's iterator.

    Messages for which an RPC ends with an error that is due to them are counted for their caller (`RejectedBytes`): the
    first name in its credentials, or without credentials its connection.
    """

    def _wrapped(self, handler: Any, details: grpc.HandlerCallDetails) -> Any:  # noqa: ARG002
        parse = handler.request_deserializer
        if parse is None and handler.request_streaming:
            return handler
        limited = partial(self._limited, handler, None if parse is None else parse.__self__)
        return wrap_handler(handler._replace(request_deserializer=None), limited, receives_stream=True)

    @asynccontextmanager
    async def _limited(
        self, handler: Any, kind: type[Message] | None, requests: AsyncIterator[bytes], context: Any
    ) -> AsyncGenerator[Any]:
        """Yields the argument of `handler`."""
        messages = Messages(requests, kind, self._rejected, caller_key(default=context.peer()))
        try:
            given = messages if handler.request_streaming else await anext(messages, None)
            if given is None:
                raise InvalidRequestError("the call has no message; send one", reason="MALFORMED_MESSAGE")
            yield given
        except (grpc.aio.AbortError, StagemeshError) as exc:
            error = exc if isinstance(exc, StagemeshError) else exc.__context__
            if isinstance(error, StagemeshError) and error.code in _FAULTS:
                messages.reject()
            if isinstance(exc, StagemeshError):
                await abort(context, exc)
            raise


def _caller(context: Any) -> str:
    for uri in context.auth_context().get("peer_uri", ()):
        return str(uri)
    return str(context.peer()).rpartition(":")[0]
