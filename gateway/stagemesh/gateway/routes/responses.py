"""`/v1/responses`: OpenAI's Responses API, which answers as `/v1/chat/completions` does, in another form."""

from functools import partial
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Query, Request
from fastapi.responses import Response

from stagemesh.client import GenerateArguments
from stagemesh.common.errors import InvalidRequestError, NotFoundError
from stagemesh.gateway.answers import list_page, respond
from stagemesh.gateway.body import aside, read_json
from stagemesh.gateway.catalog import catalog_of, find_model
from stagemesh.gateway.errors import ParameterError
from stagemesh.gateway.responses.answer import Answer, Caller
from stagemesh.gateway.responses.body import ResponseBody, encode_item
from stagemesh.gateway.responses.store import ResponseStore, StoredResponse

router = APIRouter()


@router.post("/v1/responses")
async def create_response(request: Request) -> Response:
    """Answers the input of a request, which may continue an earlier response."""
    body = await read_json(request, ResponseBody)
    model, caller = await find_model(request, body.model), await _caller_of(request)
    earlier = _earlier_items(caller, body.previous_response_id)
    own = body.items(partial(caller.store.find_item, caller.owner))
    size_bytes = sum(len(item) for item in (*earlier, *own) if isinstance(item, bytes))
    caller.sender.add(size_bytes)

    def prepare() -> tuple[GenerateArguments, list[bytes]]:
        read, given = map(_decoded, earlier), [_decoded(item) for item in own]
        return body.arguments(model, [*read], given), [encode_item(item) for item in given if body.store]

    arguments, items = await aside(prepare, size_bytes=size_bytes + len(await request.body()))
    events = model.client.generate(**arguments)
    answer = Answer(events.request_id, model, caller, items, body.echo())
    return await respond(request, events, streams=body.stream, chunks=answer.chunks, whole=answer.whole)


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


async def _caller_of(request: Request) -> Caller:
    owner = await (await catalog_of(request)).owner()
    store: ResponseStore = request.app.state.responses
    return Caller(store, owner, request.scope["sender"])


def _find(caller: Caller, response_id: str) -> StoredResponse:
    if (stored := caller.store.find(caller.owner, response_id)) is None:
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
