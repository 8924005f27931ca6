"""The gRPC side of a session's call: reads the client's events, and writes those of the session."""

import asyncio
from contextlib import aclosing
from typing import Any, TypeAlias

import grpc

from stagemesh.common.errors import NotReadyError
from stagemesh.orchestrator.session.registry import SessionRegistry
from stagemesh.orchestrator.session.session import Session
from stagemesh.orchestrator.session.session_call import SessionCall
from stagemesh.rpc.callers import caller_of
from stagemesh.rpc.handlers import to_error
from stagemesh.rpc.malformed_messages import Malformed
from stagemesh.v1 import orchestrator_pb2

_Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


async def converse(sessions: SessionRegistry, context: _Context) -> None:
    """Serves a call of Converse until it ends. Raises the error with which it ends.

    Responses are written in serialized form, because there are many of them.
    """
    opening = await _read(context)
    if opening is None or not opening.HasField("open"):
        raise NotReadyError("the first event must open the session; send `open` first", reason="SESSION_NOT_OPEN")
    opening.open.caller = caller_of(claimed=opening.open.caller)
    session, call = await sessions.open(opening.open)
    reading = asyncio.create_task(_read_events(session, call, context), name="read events of a session")
    try:
        async with aclosing(call.events()) as events:
            async for event in events:
                await context.write(event)
    finally:
        sessions.leave(session, call)
        reading.cancel()
        await asyncio.wait([reading])


async def _read_events(session: Session, call: SessionCall, context: _Context) -> None:
    try:
        while (event := await _read(context)) is not None:
            session.handle(call, event)
            await call.wait_for_space()
    except Exception as exc:  # noqa: BLE001
        call.end(to_error(exc, {}))
    else:
        session.end_input(call)


async def _read(context: _Context) -> orchestrator_pb2.ConverseRequest | None:
    """Returns the next event of the client, or None after the last one."""
    event = await context.read()
    if isinstance(event, Malformed):
        raise event.error()
    return event if isinstance(event, orchestrator_pb2.ConverseRequest) else None
