"""The answer of a model to a request, as its events arrive: from the first event, so that early errors have a status,
to the last, or until the caller leaves.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec
from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from stagemesh.client import AsyncResponseStream, Event, Finished, Queued
from stagemesh.common.errors import CancelledRequestError, StagemeshError
from stagemesh.common.tasks import end_tasks
from stagemesh.gateway.catalog import Model
from stagemesh.gateway.errors import error_body

DONE = b"data: [DONE]\n\n"

LEAST_LOGPROB = -9999.0
"""The least log-probability of an answer: JSON cannot contain minus infinity."""
EVENT_STREAM = "text/event-stream"
_STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}

T = TypeVar("T")
E = TypeVar("E")


async def respond(
    request: Request,
    events: AsyncResponseStream,
    *,
    streams: bool | None,
    chunks: Callable[[AsyncIterator[Event]], AsyncGenerator[bytes]],
    whole: Callable[[AsyncResponseStream], Awaitable[dict[str, Any]]],
) -> Response:
    """Returns the answer of a model: a stream of `chunks` if the caller asks for a stream, or else the `whole`."""
    if streams:
        return await stream(request, aiter(events), chunks)
    return JSONResponse(await until_disconnected(request, whole(events)))


async def stream(
    request: Request,
    events: AsyncGenerator[E],
    render: Callable[[AsyncIterator[E]], AsyncGenerator[bytes]],
    *,
    media_type: str = EVENT_STREAM,
    begins: Callable[[E], bool] = lambda event: not isinstance(event, Queued),
) -> StreamingResponse:
    """Returns the response that `render` makes of the events of a request, part by part.

    Waits for an event with which the response `begins`, so that an earlier error has a status of its own. By default,
    this is the admission of the request. The request is cancelled when the caller disconnects. A later error is the
    last event of a stream of events. A stream of another media type is broken off, so that the caller does not take it
    for complete.
    """
    first = await until_disconnected(request, _wait_for_beginning(events, begins))

    async def parts() -> AsyncGenerator[bytes]:
        async with aclosing(_continued(first, events)) as continued, aclosing(render(continued)) as rendered:
            try:
                async for part in rendered:
                    yield part
            except StagemeshError as exc:
                request.scope["sender"].reject(exc)
                if media_type != EVENT_STREAM:
                    raise
                yield sse(error_body(exc))

    return StreamingResponse(parts(), media_type=media_type, headers=_STREAM_HEADERS)


async def _wait_for_beginning(events: AsyncGenerator[E], begins: Callable[[E], bool]) -> E:
    """Returns the event with which the response begins. Drops those before it."""
    try:
        while not begins(event := await anext(events)):
            pass
    except BaseException:
        await events.aclose()
        raise
    return event


async def _continued(first: E, events: AsyncGenerator[E]) -> AsyncGenerator[E]:
    async with aclosing(events):
        yield first
        async for event in events:
            yield event


async def until_disconnected(request: Request, work: Awaitable[T]) -> T:
    """Returns the result of `work`. Cancels it if the caller disconnects, and raises CancelledRequestError."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait([working, leaving], return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise CancelledRequestError("the caller disconnected", reason="CALLER_DISCONNECTED")
    finally:
        await end_tasks([working, leaving])


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def sse(body: Mapping[str, Any], *, event: str = "") -> bytes:
    """Returns a server-sent event."""
    name = b"event: %s\n" % event.encode() if event else b""
    return b"%sdata: %s\n\n" % (name, msgspec.json.encode(body))


def now_s() -> int:
    """Returns the time in whole seconds since 1970."""
    return int(time.time())


def usage_of(finished: Finished, model: Model) -> dict[str, Any]:
    """Returns the tokens of the stage that makes the text, or of all stages if there is none."""
    output = model.output("text")
    used = finished.usage
    stages = [used[output.stage]] if output is not None and output.stage in used else list(used.values())
    prompt, made = sum(each.prompt_tokens for each in stages), sum(each.output_tokens for each in stages)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": made,
        "total_tokens": prompt + made,
        "prompt_tokens_details": {"cached_tokens": sum(each.cached_tokens for each in stages)},
    }


def token_counts(finished: Finished, model: Model) -> dict[str, int]:
    """Returns the numbers of tokens of `usage_of` by the names that OpenAI's newer endpoints have for them."""
    used = usage_of(finished, model)
    return {
        "input_tokens": used["prompt_tokens"],
        "output_tokens": used["completion_tokens"],
        "total_tokens": used["total_tokens"],
    }
