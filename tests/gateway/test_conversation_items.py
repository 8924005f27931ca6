"""The items of a realtime conversation: their order, their memory and their maximum."""

import json
import tracemalloc
from typing import Any

import pytest
import websockets
from hypothesis import given
from hypothesis import strategies as st

from stagemesh.common.errors import InvalidRequestError, StagemeshError
from stagemesh.gateway.realtime import items
from stagemesh.gateway.realtime.events import CLIENT_EVENT
from stagemesh.gateway.realtime.items import Conversation, FunctionCallItem, UserMessage
from tests.gateway.attacks import attacked


def _message(**fields: Any) -> UserMessage:
    part = {"type": "input_text", "text": fields.pop("text", "x")}
    return UserMessage.model_validate({"role": "user", "content": [part] * fields.pop("parts", 1), **fields})


@pytest.mark.parametrize(
    "make",
    [
        _message,
        lambda: _message(parts=20),
        lambda: _message(text="\u4e2d" * 1000),
        lambda: FunctionCallItem(name="f", arguments="{}", call_id="c" * 5_000),
        lambda: UserMessage.model_validate(
            {"role": "user", "content": [{"type": "input_audio", "audio": "", "transcript": "x" * 5_000}]}
        ),
    ],
)
def test_items_count_at_least_their_memory(make: Any) -> None:
    conversation = Conversation()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(300):
            # Copies of texts as a message from a caller would have them.
            conversation.insert(CLIENT_EVENT.validate_python(_created(make())).item)  # type: ignore[union-attr]
        used = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert used <= conversation.size_bytes


def _created(item: Any) -> Any:
    return json.loads(json.dumps({"type": "conversation.item.create", "item": item.model_dump(exclude_none=True)}))


@given(
    st.lists(
        st.tuples(st.sampled_from(["insert", "delete"]), st.integers(0, 9), st.sampled_from(["", "root", *"abcdefgh"]))
    )
)
def test_a_conversation_has_the_order_of_its_insertions(steps: list[tuple[str, int, str]]) -> None:
    conversation, order = Conversation(), list[str]()
    for action, number, previous in steps:
        item_id = "abcdefghij"[number]
        if action == "delete":
            if item_id in order:
                conversation.delete(item_id)
                order.remove(item_id)
        elif item_id not in order and previous in {"", "root", *order}:
            conversation.insert(_message(id=item_id), previous_id=previous or None)
            order.insert(
                len(order) if not previous else 0 if previous == "root" else order.index(previous) + 1, item_id
            )
        assert [each.key for each in conversation.items] == order
        assert conversation.last_id == (order[-1] if order else None)
    assert conversation.size_bytes == sum(map(items.memory_bytes, conversation.items))


def test_an_insertion_does_not_visit_other_items(monkeypatch: pytest.MonkeyPatch) -> None:
    conversation, measured, measure = Conversation(), list[object](), items.memory_bytes
    for _ in range(1000):
        conversation.insert(_message())

    def observed(value: object) -> int:
        measured.append(value)
        return measure(value)

    monkeypatch.setattr(items, "memory_bytes", observed)
    conversation.insert(_message())
    conversation.insert(_message(), previous_id="root")
    assert len(measured) < 50


def test_an_item_cannot_be_the_root() -> None:
    with pytest.raises(InvalidRequestError, match="root"):
        Conversation().insert(_message(id="root"))


def test_a_conversation_has_a_maximum_of_items() -> None:
    conversation = Conversation()
    with pytest.raises(StagemeshError, match="items"):
        for _ in range(5_000):
            conversation.insert(_message())


async def test_a_response_refers_to_an_item_once() -> None:
    item = {"type": "message", "role": "user", "id": "a", "content": [{"type": "input_text", "text": "hi"}]}
    twice = [{"type": "item_reference", "id": "a"}] * 2
    async with attacked() as (orchestrator, address):
        async with websockets.connect(f"ws://{address}/v1/realtime?model=p") as socket:
            await socket.send(json.dumps({"type": "conversation.item.create", "item": item}))
            await socket.send(json.dumps({"type": "response.create", "response": {"input": twice}}))
            while (event := json.loads(await socket.recv()))["type"] != "error":
                pass
        assert "twice" in event["error"]["message"]
        assert not orchestrator.requests
