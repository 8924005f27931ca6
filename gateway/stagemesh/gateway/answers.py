"""The answer of a model to a request, as its events arrive: from the first output to the last event, or until the
caller leaves. An error before the first output has an HTTP status.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec
from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from stagemesh.client import AsyncResponseStream, Event, Finished, OutputFinished
from stagemesh.client.responses import OutputEvent
from stagemesh.common.errors import CancelledRequestError, StagemeshError
from stagemesh.common.tasks import end_tasks
from stagemesh.gateway.catalog import Model
from stagemesh.gateway.errors import error_body
from stagemesh.gateway.parameters import warnings_field

DONE = b"data: [DONE]\n\n"
HEARTBEAT_S = 12.0
"""The time without an output after which a stream of events has a comment, in seconds. Proxies end silent streams."""
HEARTBEAT = b": waiting\n\n"

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
    answer = await until_disconnected(request, whole(events))
    return JSONResponse({**answer, **warnings_field()})


async def stream(
    request: Request,
    events: AsyncGenerator[E],
    render: Callable[[AsyncIterator[E]], AsyncGenerator[bytes]],
    *,
    media_type: str = EVENT_STREAM,
) -> StreamingResponse:
    """Returns the response that `render` makes of the events of a request, part by part.

    Waits for the first output. An earlier error has its HTTP status. A stream of events starts after 12 s in any case,
    and contains a comment every 12 s until the first output. The request is cancelled when the caller disconnects. A
    later error is an event before the end of a stream of events. A stream of another media type is broken off. The
    caller does not take it for complete then.
    """
    heartbeat_s = HEARTBEAT_S if media_type == EVENT_STREAM else None
    first = asyncio.create_task(first_output(events))
    try:
        await until_disconnected(request, asyncio.wait([first], timeout=heartbeat_s))
        if first.done():
            first.result()
    except BaseException:
        await end_tasks([first])
        raise

    async def parts() -> AsyncGenerator[bytes]:
        async with aclosing(events), aclosing(continued(first, events)) as rest:
            try:
                while not first.done():
                    yield HEARTBEAT
                    await asyncio.wait([first], timeout=heartbeat_s)
                async with aclosing(render(rest)) as rendered:
                    async for part in rendered:
                        yield part
            except StagemeshError as exc:
                request.scope["sender"].reject(exc)
                if media_type != EVENT_STREAM:
                    raise
                yield sse(error_body(exc)) + DONE
            finally:
                await end_tasks([first])

    return StreamingResponse(parts(), media_type=media_type, headers=_STREAM_HEADERS)


async def first_output(events: AsyncIterator[E]) -> E | None:
    """Returns the first event of an output, or the last event if no output has one. Drops the events before it."""
    last: E | None = None
    async for last in events:
        if isinstance(last, OutputEvent) and not _is_incomplete(last):
            break
    return last


async def continued(first: Awaitable[E | None], events: AsyncIterator[E]) -> AsyncGenerator[E]:
    """Yields the events from the first output on, without the ends of incomplete outputs, which an error follows."""
    if (event := await first) is not None:
        yield event
    async for event in events:
        if not _is_incomplete(event):
            yield event


def _is_incomplete(event: object) -> bool:
    return isinstance(event, OutputFinished) and event.reason in {"failed", "cancelled"}


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


def sse_data(events: bytes) -> list[str]:
    """Returns the bodies of server-sent events, as JSON."""
    return [event.partition("data: ")[2] for event in events.decode().split("\n\n") if event]


def list_page(data: Sequence[Mapping[str, Any]], *, has_more: bool) -> dict[str, Any]:
    """Returns a page of a list, whose entries have ids."""
    ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {"first_id": None, "last_id": None}
    return {"object": "list", "data": data, **ends, "has_more": has_more}


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


def usage_so_far(event: OutputEvent) -> dict[str, dict[str, int]]:
    """Returns the field of a stream's part with the usage. Empty if the request does not ask for it."""
    if event.counts is None:
        return {}
    prompt, made = event.counts
    return {"usage": {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made}}


def token_counts(finished: Finished, model: Model) -> dict[str, int]:
    """Returns the numbers of tokens of `usage_of` by the names that OpenAI's newer endpoints have for them."""
    used = usage_of(finished, model)
    return {
        "input_tokens": used["prompt_tokens"],
        "output_tokens": used["completion_tokens"],
        "total_tokens": used["total_tokens"],
    }
