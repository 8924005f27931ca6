"""`/v1/responses`: OpenAI's Responses API, which answers as `/v1/chat/completions` does, in another form."""

import asyncio
from collections import deque
from contextlib import aclosing
from functools import partial
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Query, Request
from fastapi.responses import Response
from pydantic import TypeAdapter
from starlette.requests import HTTPConnection
from starlette.websockets import WebSocket

from stagemesh.client import AsyncResponseStream, GenerateArguments
from stagemesh.common.errors import InvalidRequestError, NotFoundError, OverloadedError, StagemeshError
from stagemesh.gateway.answers import continued, first_output, list_page, respond, sse_data
from stagemesh.gateway.body import Object, aside, read_json, validate
from stagemesh.gateway.catalog import catalog_of, find_model
from stagemesh.gateway.errors import ParameterError, error_body, too_deep
from stagemesh.gateway.limits import Sender
from stagemesh.gateway.parameters import collected_warnings
from stagemesh.gateway.responses.answer import Answer, Caller
from stagemesh.gateway.responses.body import ResponseBody, encode_item
from stagemesh.gateway.responses.store import ResponseStore, StoredResponse
from stagemesh.gateway.websockets import JsonSocket, accept

router = APIRouter()

_MAX_WAITING = 16
"""The maximum number of requests of a WebSocket that wait."""
_MAX_PRIVATE = 1000
"""The number of its newest responses without `store` that are dropped at its end. Older ones expire."""
_EVENT = TypeAdapter[Object](dict[str, Any])
_EVENT_FIELDS = {"type", "event_id"}
"""The fields of an event that no body has."""


@router.post("/v1/responses")
async def create_response(request: Request) -> Response:
    """Answers the input of a request, which may continue an earlier response."""
    body = await read_json(request, ResponseBody)
    events, answer = await _start(request, body, await _caller_of(request), size_bytes=len(await request.body()))
    return await respond(request, events, streams=body.stream, chunks=answer.chunks, whole=answer.whole)


async def _start(
    connection: HTTPConnection, body: ResponseBody, caller: Caller, *, size_bytes: int
) -> tuple[AsyncResponseStream, Answer]:
    """Returns the events and the answer of a request whose body has this size."""
    model = await find_model(connection, body.model)
    earlier = _earlier_items(caller, body.previous_response_id)
    own = body.items(partial(caller.store.find_item, caller.owner))
    stored_bytes = sum(len(item) for item in (*earlier, *own) if isinstance(item, bytes))
    caller.sender.add(stored_bytes)
    keeps = body.store or caller.private_ids is not None

    def prepare() -> tuple[GenerateArguments, list[bytes]]:
        read, given = map(_decoded, earlier), [_decoded(item) for item in own]
        return body.arguments(model, [*read], given), [encode_item(item) for item in given if keeps]

    arguments, items = await aside(prepare, size_bytes=stored_bytes + size_bytes)
    events = model.client.generate(**arguments)
    return events, Answer(events.request_id, model, caller, items, body.echo())


@router.websocket("/v1/responses")
async def create_responses(websocket: WebSocket) -> None:
    """Answers the requests of a WebSocket one after the other, each with the events of a stream."""
    caller = await accept(websocket, _caller_of(websocket))
    if caller is not None:
        await _Connection(websocket, caller).serve()


class _Connection:
    """A WebSocket with requests for responses. The next one waits until the running one has ended."""

    def __init__(self, websocket: WebSocket, caller: Caller) -> None:
        self._websocket, self._socket = websocket, JsonSocket(websocket)
        self._caller, self._private_ids = caller, deque[str](maxlen=_MAX_PRIVATE)
        self._waiting = asyncio.Queue[tuple[Object, Sender]](_MAX_WAITING)

    async def serve(self) -> None:
        """Serves the client until it disconnects."""
        try:
            async with asyncio.TaskGroup() as tasks:
                answering = tasks.create_task(self._answer_all())
                await self._socket.serve(_EVENT, self._handle, large=("response.create",))
                answering.cancel()
        finally:
            while not self._waiting.empty():
                self._waiting.get_nowait()[1].hold(0)
            for each in self._private_ids:
                self._caller.store.delete(self._caller.owner, each)

    async def _handle(self, event: Object) -> None:
        match event.get("type"):
            case "response.create":
                if self._waiting.full():
                    problem = f"{_MAX_WAITING} requests of the WebSocket wait, which is the limit; wait for responses"
                    raise OverloadedError(problem, reason="CALL_LIMIT")
                self._waiting.put_nowait((event, self._socket.sender.for_event()))
            case "response.cancel":
                key = self._caller.owner, str(event.get("response_id"))
                if cancel := self._caller.store.running.get(key):
                    await cancel()
                elif self._caller.store.find(*key) is None:
                    raise _unknown(key[1])
            case kind:
                raise ParameterError("type", f"{str(kind)[:140]!r} is unknown; send response.create or response.cancel")

    async def _answer_all(self) -> None:
        while True:
            event, sender = await self._waiting.get()
            try:
                await self._answer(event, self._caller._replace(sender=sender, private_ids=self._private_ids))
            except (StagemeshError, RecursionError) as exc:
                error = exc if isinstance(exc, StagemeshError) else too_deep()
                sender.reject(error)
                await self._socket.send("error", **error_body(error))
            finally:
                sender.hold(0)

    async def _answer(self, event: Object, caller: Caller) -> None:
        fields, size_bytes = {name: event[name] for name in event.keys() - _EVENT_FIELDS}, caller.sender.held_bytes
        with collected_warnings():
            body = await aside(partial(validate, ResponseBody, {**fields, "stream": True}), size_bytes=size_bytes)
            events, answer = await _start(self._websocket, body, caller, size_bytes=size_bytes)
        async with aclosing(aiter(events)) as received:
            # An error before the first output has no other event.
            await (first := asyncio.create_task(first_output(received)))
            async with aclosing(continued(first, received)) as rest, aclosing(answer.chunks(rest)) as parts:
                async for part in parts:
                    for text in sse_data(part):
                        await self._socket.send_text(text)


@router.get("/v1/responses/{response_id}")
async def read_response(response_id: str, request: Request, stream: bool = False) -> Response:
    """Returns a stored response."""
    if stream:
        raise ParameterError("stream", "the events of a stored response are not kept; omit it")
    stored = _find(await _caller_of(request), response_id)
    return Response(stored.response, media_type="application/json")


@router.delete("/v1/responses/{response_id}")
async def delete_response(response_id: str, request: Request) -> dict[str, Any]:
    """Deletes a stored response. Responses that continue it cannot be continued any more."""
    caller = await _caller_of(request)
    if not caller.store.delete(caller.owner, response_id):
        raise _unknown(response_id)
    return {"id": response_id, "object": "response", "deleted": True}


@router.post("/v1/responses/{response_id}/cancel")
async def cancel_response(response_id: str, request: Request) -> dict[str, Any]:
    """Stops the response of a stream that the caller receives."""
    caller = await _caller_of(request)
    cancel = caller.store.running.get((caller.owner, response_id))
    if cancel is None:
        _find(caller, response_id)
        raise InvalidRequestError("the response has ended; only the response of a running stream can be cancelled")
    return await cancel()


@router.get("/v1/responses/{response_id}/input_items")
async def list_input_items(
    response_id: str,
    request: Request,
    after: str | None = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Literal["asc", "desc"] = "desc",
) -> dict[str, Any]:
    """Lists the items from which a response was made, including the items of earlier responses."""
    caller = await _caller_of(request)
    stored = _find(caller, response_id)
    items = [*_earlier_items(caller, stored.previous_id), *stored.input]
    found = [msgspec.json.decode(item) for item in (items if order == "asc" else reversed(items))]
    begin = 0 if after is None else next((n + 1 for n, item in enumerate(found) if item["id"] == after), len(found))
    return list_page(found[begin : begin + limit], has_more=begin + limit < len(found))


def _decoded(item: dict[str, Any] | bytes) -> dict[str, Any]:
    return msgspec.json.decode(item) if isinstance(item, bytes) else item


async def _caller_of(connection: HTTPConnection) -> Caller:
    owner = await (await catalog_of(connection)).owner()
    store: ResponseStore = connection.app.state.responses
    return Caller(store, owner, connection.scope["sender"])


def _find(caller: Caller, response_id: str) -> StoredResponse:
    stored = caller.store.find(caller.owner, response_id)
    if stored is None or stored.is_private:
        raise _unknown(response_id)
    return stored


def _earlier_items(caller: Caller, response_id: str | None) -> list[bytes]:
    """Returns the items of a response and of those before it. Raises ParameterError if one is not stored."""
    responses = caller.store.context(caller.owner, response_id)
    if responses is None:
        problem = (
            f"the response {str(response_id)[:140]!r}, or one before it, is not stored: it has expired, was not to be "
            "stored, or is stored by another gateway; send the whole conversation as the input"
        )
        raise ParameterError("previous_response_id", problem, code="previous_response_not_found")
    return [item for each in responses for item in each.items]


def _unknown(response_id: str) -> NotFoundError:
    problem = f"no stored response has the id {response_id[:140]!r}; it has expired, or was not to be stored"
    return NotFoundError(problem, reason="UNKNOWN_REQUEST")
