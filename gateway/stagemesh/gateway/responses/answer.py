"""A response: built from the events of its request, with OpenAI's event for each change."""

from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing
from itertools import count
from typing import Any, NamedTuple
from uuid import uuid4

import msgspec

from stagemesh.client import AsyncResponseStream, Event, Finished, OutputFinished, Reasoning, Text, ToolCallPart
from stagemesh.common.errors import CancelledRequestError, StagemeshError
from stagemesh.gateway.answers import now_s, sse, token_counts, usage_of
from stagemesh.gateway.catalog import Model
from stagemesh.gateway.errors import error_body
from stagemesh.gateway.limits import Sender
from stagemesh.gateway.parameters import warnings_field
from stagemesh.gateway.responses.store import ResponseStore, StoredResponse
from stagemesh.gateway.routes.chat import FINISH_REASONS, to_logprob

_GROWING = {"msg": "output_text", "rs": "reasoning_text", "fc": "function_call_arguments"}
"""The names of the texts that grow in the items of an output, by the prefix of the ids of the items."""


class Caller(NamedTuple):
    """The caller of a request: the store of responses, its name there, and what counts its rejected content."""

    store: ResponseStore
    owner: str
    sender: Sender
    private_ids: deque[str] | None = None
    """The ids of the responses that a WebSocket keeps although they were not to be stored. None over HTTP."""


class Answer:
    """The answer to a request: a response, which is stored when it ends if its parameters say so."""

    def __init__(
        self, request_id: str, model: Model, caller: Caller, items: Sequence[bytes], parameters: Mapping[str, Any]
    ) -> None:
        """`items` is the request's own input, as JSON. `parameters` are those that the response repeats."""
        self._request_id, self._model, self._caller, self._items = request_id, model, caller, items
        self._numbers = count()
        self._grows = ""
        """The name of the text that grows in the last item of the output."""
        self._item: dict[str, Any] | None = None
        """The last item of the output, if it may grow."""
        self._call, self._texts, self._logprobs = -1, list[str](), list[Any]()
        """The index of the tool call that this item is, its texts, and the log-probabilities of its tokens."""
        self._blank = list[Text]()
        """White space, which belongs to the next text if one follows."""
        self._length_reached = False
        self._output: list[dict[str, Any]] = []
        fields = {"object": "response", "created_at": now_s(), "model": model.id, "output": self._output}
        fields |= {"status": "in_progress", "background": False, "truncation": "disabled"}
        missing = dict.fromkeys(("completed_at", "error", "incomplete_details", "usage"))
        self._response: dict[str, Any] = {"id": f"resp_{request_id}", **fields, **missing, **parameters}
        self._response |= warnings_field()

    async def chunks(self, events: AsyncIterator[Event]) -> AsyncGenerator[bytes]:
        """Yields the events of a stream. An error is an event, too, except on a WebSocket: it ends responses once."""
        key, running = (self._caller.owner, self._response["id"]), self._caller.store.running
        running[key] = self._cancel
        try:
            async with aclosing(self._report(events)) as reported:
                async for part in reported:
                    yield part
        except StagemeshError as exc:
            self._caller.sender.reject(exc)
            yield b"".join(self._fail(exc))
        finally:
            del running[key]

    async def whole(self, events: AsyncResponseStream) -> dict[str, Any]:
        """Returns the whole response."""
        async with aclosing(self._report(aiter(events))) as reported:
            async for _ in reported:
                pass
        return self._response

    async def _cancel(self) -> dict[str, Any]:
        await self._model.client.cancel(self._request_id)
        return {**self._response, "status": "cancelled"}

    async def _report(self, events: AsyncIterator[Event]) -> AsyncGenerator[bytes]:
        yield self._event("response.created") + self._event("response.in_progress")
        async for event in events:
            if part := b"".join(self._take(event)):
                yield part
        yield b"".join(self._finish())

    def _take(self, event: Event) -> Iterator[bytes]:
        match event:
            case Text(delta=delta) if self._open_type != "message" and not delta.strip():
                self._blank.append(event)
            case Text():
                yield from self._add_texts(event)
            case Reasoning():
                if self._open_type != "reasoning":
                    yield from self._open("rs", type="reasoning", summary=[], content=[])
                yield self._grow(event.delta)
            case ToolCallPart():
                if self._call != event.call:
                    call = {"call_id": event.id, "name": event.name, "arguments": ""}
                    yield from self._open("fc", type="function_call", **call)
                    self._call = event.call
                yield self._grow(event.arguments)
            case OutputFinished():
                self._length_reached |= FINISH_REASONS.get(event.reason) == "length"
            case Finished():
                cached = usage_of(event, self._model)["prompt_tokens_details"]
                self._response["usage"] = {
                    **token_counts(event, self._model),
                    "input_tokens_details": {"cache_write_tokens": 0, **cached},
                    "output_tokens_details": {"reasoning_tokens": 0},
                }
            case _:
                pass

    def _event(self, kind: str, **fields: Any) -> bytes:
        """Returns an event. Without fields, it has the response."""
        fields = fields or {"response": self._response}
        return sse({"type": kind, "sequence_number": next(self._numbers), **fields}, event=kind)

    def _item_event(self, change: str, **fields: Any) -> bytes:
        """Returns an event about a change of the last item of the output, or of its only content."""
        item, place = self._output[-1], len(self._output) - 1
        if "content" in item:
            fields["content_index"] = 0
        return self._event(f"response.{change}", item_id=item["id"], output_index=place, **fields)

    def _open(self, prefix: str, **fields: Any) -> Iterator[bytes]:
        """Ends the last item of the output, and adds one with these fields."""
        yield from self._close()
        self._item = {"id": f"{prefix}_{uuid4().hex}", "status": "in_progress", **fields}
        self._output.append(self._item)
        self._grows = _GROWING[prefix]
        yield self._event("response.output_item.added", output_index=len(self._output) - 1, item=self._item)
        if "content" in fields:
            extra = dict[str, Any](annotations=[], logprobs=[]) if prefix == "msg" else {}
            part = {"type": self._grows, "text": "", **extra}
            yield self._item_event("content_part.added", part=part)
            self._item["content"] = [part]

    def _add_texts(self, *texts: Text) -> Iterator[bytes]:
        if self._open_type != "message":
            yield from self._open("msg", type="message", role="assistant", content=[])
        texts, self._blank = (*self._blank, *texts), []
        for each in texts:
            logprobs = [to_logprob(token) for token in each.logprobs]
            self._logprobs += logprobs
            yield self._grow(each.delta, logprobs=logprobs)

    @property
    def _open_type(self) -> str:
        """The type of the last item of the output, if the item may grow."""
        return self._item["type"] if self._item is not None else ""

    def _grow(self, text: str, **fields: Any) -> bytes:
        """Adds text to the last item of the output."""
        self._texts.append(text)
        return self._item_event(f"{self._grows}.delta", delta=text, **fields)

    def _close(self, status: str = "completed") -> Iterator[bytes]:
        """Ends the last item of the output, if it may grow."""
        item, text, logprobs = self._item, "".join(self._texts), self._logprobs
        self._item, self._texts, self._logprobs, self._call = None, [], [], -1
        if item is None:
            return
        item["status"] = status
        if item["type"] == "function_call":
            item["arguments"] = text
            yield self._item_event(f"{self._grows}.done", name=item["name"], arguments=text)
        else:
            (part,) = item["content"]
            part["text"] = text
            scored = {"logprobs": logprobs} if item["type"] == "message" else {}
            part |= scored
            yield self._item_event(f"{self._grows}.done", text=text, **scored)
            yield self._item_event("content_part.done", part=part)
        yield self._event("response.output_item.done", output_index=len(self._output) - 1, item=item)

    def _finish(self) -> Iterator[bytes]:
        if not self._output:
            yield from self._add_texts()
        if self._length_reached:
            self._response["incomplete_details"] = {"reason": "max_output_tokens"}
            yield from self._end("incomplete")
        else:
            self._response["completed_at"] = now_s()
            yield from self._end("completed")

    def _fail(self, error: StagemeshError) -> Iterator[bytes]:
        if isinstance(error, CancelledRequestError):
            yield from self._end("cancelled")
            return
        fields = error_body(error)["error"]
        self._response["error"] = {"code": fields["code"], "message": fields["message"]}
        yield from self._end("failed")
        # OpenAI documents an event with the fields of the error. Its server sends an object with them in the event.
        # A client that reuses its WebSocket would take the event for one of its next response.
        if self._caller.private_ids is None:
            yield self._event("error", **{**fields, "type": "error"}, error=fields)

    def _end(self, status: str) -> Iterator[bytes]:
        """Ends the output, stores the response if it is to be stored, and reports its end."""
        yield from self._close("completed" if status == "completed" else "incomplete")
        self._response["status"] = status
        is_public, private_ids, response_id = self._response["store"], self._caller.private_ids, self._response["id"]
        if is_public or private_ids is not None:
            output = {item["id"]: msgspec.json.encode(item) for item in self._output}
            previous_id, encoded = self._response["previous_response_id"], msgspec.json.encode(self._response)
            stored = StoredResponse(encoded, self._items, output, previous_id, is_private=not is_public)
            is_stored = self._caller.store.add(self._caller.owner, response_id, stored)
            self._response["store"] = is_public and is_stored
            if private_ids is not None and is_stored and not is_public:
                private_ids.append(response_id)
        # A client that does not expect the end of a cancelled response takes it for an incomplete one.
        yield self._event(f"response.{'incomplete' if status == 'cancelled' else status}")
