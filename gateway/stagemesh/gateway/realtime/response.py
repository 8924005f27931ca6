"""A response of the model in a realtime conversation: runs its request, and sends its events."""

import asyncio
import base64
from collections.abc import Mapping
from contextlib import aclosing
from typing import Any, Literal, TypeAlias
from uuid import uuid4

from stagemesh.client import (
    Admitted,
    AsyncResponseStream,
    AudioChunk,
    Event,
    Finished,
    OutputFinished,
    Text,
    ToolCall,
    ToolCallPart,
)
from stagemesh.client.responses import join_calls
from stagemesh.common.errors import InternalError, StagemeshError
from stagemesh.common.tasks import end_tasks
from stagemesh.gateway.answers import token_counts, usage_of
from stagemesh.gateway.audio import AnswerEncoder
from stagemesh.gateway.catalog import Model
from stagemesh.gateway.errors import error_body
from stagemesh.gateway.realtime.g711 import G711
from stagemesh.gateway.realtime.items import (
    AssistantMessage,
    Conversation,
    FunctionCallItem,
    Item,
    OutputAudioContent,
    OutputText,
)
from stagemesh.gateway.realtime.settings import Settings
from stagemesh.gateway.websockets import JsonSocket

CancelReason: TypeAlias = Literal["turn_detected", "client_cancelled"]
Status: TypeAlias = Literal["completed", "cancelled", "incomplete", "failed"]
_NO_USAGE: Mapping[str, Any] = {
    **dict.fromkeys(("input_tokens", "output_tokens", "total_tokens"), 0),
    **{details: {} for details in ("input_token_details", "output_token_details")},
}
"""The usage of a response that was cancelled, which is not known. Clients read the usage of every response."""


class Response:
    """One response. Its message is added to the conversation when its first text arrives, or its first audio."""

    def __init__(
        self,
        response_stream: AsyncResponseStream,
        settings: Settings,
        model: Model,
        conversation: Conversation | None,
        socket: JsonSocket,
        *,
        prompt_bytes: int,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        """`conversation` receives the items of the response. None if the response belongs to no conversation.

        `prompt_bytes` is the size of the items and texts of which the prompt may consist.
        """
        self.id = f"resp_{uuid4().hex}"
        self._response_stream, self._settings, self._model, self._send = response_stream, settings, model, socket.send
        self._sender, self.prompt_bytes = socket.sender, prompt_bytes
        self._conversation, self._metadata = conversation, metadata
        self.replicas: Mapping[str, str] = {}
        """The replicas on which the response runs, by stage. Empty before it is admitted."""
        self._output: list[Item] = []
        self._message: AssistantMessage | None = None
        self._early_audio: list[bytes] = []
        """The audio that arrived before the first text. It is dropped if the model only calls tools."""
        self._call_parts: list[ToolCallPart] = []
        self._encoder = AnswerEncoder("pcm16") if settings.speaks else None
        self._text_event = "output_audio_transcript" if settings.speaks else "output_text"
        self._text_field = "transcript" if settings.speaks else "text"
        audio_format = settings.audio.output.format.type
        self._g711 = None if audio_format == "audio/pcm" else G711(audio_format, "encode")
        self._length_reached = False
        self._usage: Mapping[str, Any] | None = None
        """The number of tokens. None if the response has not ended."""
        self._task: asyncio.Task[None] | None = None
        self._is_ending = False

    @property
    def is_running(self) -> bool:
        """Whether the response has not ended."""
        return self._task is not None and not self._task.done()

    async def start(self, **fields: Any) -> None:
        """Reports the response, with further fields of the event, and starts its request."""
        await self._send("response.created", response=self._to_json("in_progress"), **fields)
        self._task = asyncio.create_task(self._run())

    async def cancel(self, reason: CancelReason) -> None:
        """Stops the response, and reports its end. No output follows. Does nothing if it has ended."""
        if not self.is_running:
            return
        assert self._task is not None, "a running response has a task"
        if not self._is_ending:
            self._task.cancel()
        await asyncio.wait([self._task])
        if not self._is_ending:
            await self._end("cancelled", {"reason": reason})

    async def stop(self) -> None:
        """Stops the response without a report, because the client has disconnected."""
        if self._task is not None:
            await end_tasks([self._task])

    async def _run(self) -> None:
        try:
            async with aclosing(aiter(self._response_stream)) as events:
                async for event in events:
                    await self._handle(event)
        except StagemeshError as exc:
            await self._fail(exc)
        except Exception as exc:
            await self._fail(InternalError(f"an unexpected {type(exc).__name__}; the gateway's log has the details"))
            raise
        else:
            details = {"reason": "max_output_tokens"} if self._length_reached else {}
            await self._end("incomplete" if self._length_reached else "completed", details)

    async def _fail(self, error: StagemeshError) -> None:
        self._sender.reject(error, size_bytes=self.prompt_bytes)
        await self._end("failed", error_body(error))

    async def _handle(self, event: Event) -> None:
        match event:
            case Admitted():
                self.replicas = event.replicas
            case Text():
                if self._message is not None or not event.delta.isspace():
                    await self._add_text(event.delta)
            case ToolCallPart():
                self._call_parts.append(event)
            case AudioChunk() if self._encoder is not None:
                await self._add_audio(self._encoder.push(event))
            case OutputFinished() if event.output == self._model.require_output("text"):
                self._length_reached = event.reason in {"length", "limit"}
                for call in join_calls(self._call_parts):
                    await self._add_call(call)
            case OutputFinished() if self._encoder is not None:
                await self._add_audio(self._encoder.finish())
            case Finished():
                details = usage_of(event, self._model)["prompt_tokens_details"]
                self._usage = {**_NO_USAGE, **token_counts(event, self._model), "input_token_details": details}
            case _:
                pass

    async def _add_text(self, text: str) -> None:
        message = self._message or await self._begin_message()
        message.append(text)
        await self._send_part(f"response.{self._text_event}.delta", message, delta=text)
        early, self._early_audio = self._early_audio, []
        for pcm in early:
            await self._add_audio(pcm)

    async def _add_audio(self, pcm: bytes) -> None:
        if self._message is None:
            self._early_audio.append(pcm)
        elif pcm:
            self._message.add_audio(pcm)
            data = base64.b64encode(pcm if self._g711 is None else self._g711.encode(pcm)).decode()
            await self._send_part("response.output_audio.delta", self._message, delta=data)

    async def _add_call(self, call: ToolCall) -> None:
        item = FunctionCallItem(name=call.name, arguments=str(call.arguments), call_id=call.id)
        await self._add_item(item)
        position: Any = {"call_id": item.call_id, **self._position(item)}
        await self._send("response.function_call_arguments.delta", delta=call.arguments, **position)
        await self._send("response.function_call_arguments.done", name=call.name, arguments=call.arguments, **position)
        await self._end_item(item, "completed")

    async def _begin_message(self) -> AssistantMessage:
        content = OutputAudioContent() if self._settings.speaks else OutputText()
        self._message = message = AssistantMessage(content=[content])
        await self._add_item(message)
        await self._send_part("response.content_part.added", message, part=self._part(message))
        return message

    async def _add_item(self, item: Item) -> None:
        item.status = "in_progress"
        previous_id = (self._conversation or Conversation()).insert(item)
        self._output.append(item)
        index = len(self._output) - 1
        await self._send("response.output_item.added", response_id=self.id, output_index=index, item=item.to_json())
        if self._conversation is not None:
            await self._send("conversation.item.added", previous_item_id=previous_id, item=item.to_json())

    async def _end_item(self, item: Item, status: Literal["completed", "incomplete"]) -> None:
        item.status = status
        fields: Any = {"response_id": self.id, "output_index": self._output.index(item), "item": item.to_json()}
        await self._send("response.output_item.done", **fields)
        if self._conversation is not None:
            self._conversation.measure(item)
            await self._send("conversation.item.done", item=item.to_json())

    async def _end(self, status: Status, details: Mapping[str, Any]) -> None:
        self._is_ending, self._usage = True, self._usage or _NO_USAGE
        if (message := self._message) is not None:
            if self._settings.speaks:
                await self._send_part("response.output_audio.done", message)
            await self._send_part(f"response.{self._text_event}.done", message, **{self._text_field: message.text})
            await self._send_part("response.content_part.done", message, part=self._part(message))
            await self._end_item(message, "completed" if status == "completed" else "incomplete")
        await self._send("response.done", response=self._to_json(status, details))

    async def _send_part(self, event_type: str, message: AssistantMessage, **fields: Any) -> None:
        await self._send(event_type, content_index=0, **self._position(message), **fields)

    def _position(self, item: Item) -> dict[str, Any]:
        return {"response_id": self.id, "item_id": item.id, "output_index": self._output.index(item)}

    def _part(self, message: AssistantMessage) -> dict[str, Any]:
        return {"type": "audio" if self._settings.speaks else "text", self._text_field: message.text}

    def _to_json(self, status: Status | Literal["in_progress"], details: Mapping[str, Any] | None = None) -> Any:
        return {
            "object": "realtime.response",
            "id": self.id,
            "status": status,
            "status_details": None if status == "in_progress" else {"type": status, **(details or {})},
            "output": [item.to_json() for item in self._output],
            "conversation_id": None if self._conversation is None else self._conversation.id,
            "output_modalities": self._settings.output_modalities,
            "max_output_tokens": self._settings.max_output_tokens or "inf",
            "audio": {"output": self._settings.audio.output.model_dump(include={"format", "voice"})},
            "usage": self._usage,
            "metadata": self._metadata,
        }
