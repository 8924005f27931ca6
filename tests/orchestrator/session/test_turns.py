"""The contents of turns: the pieces of their input, and the part of an answer that the user has heard."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagemesh.common.errors import InvalidRequestError, OverloadedError
from stagemesh.common.requests.request_checks import read_samples
from stagemesh.common.requests.turn_content import PromptInput, shorten
from stagemesh.common.wire.tensors import inline_tensor
from stagemesh.orchestrator.session.turn_input import Credit
from stagemesh.orchestrator.session.turns import Transcript, TranscriptTurn, restored_turn
from stagemesh.v1 import orchestrator_pb2, request_pb2
from tests.orchestrator.session.fake_runner import Chat, chatting, settle
from tests.rpc.call_errors import raises

RATE_HZ = 1000
Piece = orchestrator_pb2.InputAppend


def text(content: str) -> Piece:
    return Piece(part=request_pb2.Part(text=content))


def audio(*values: float, rate_hz: int = RATE_HZ, channels: int = 1) -> Piece:
    samples = np.array(values, np.float32)
    samples = samples if channels == 1 else np.stack([samples] * channels, axis=1)
    part = request_pb2.Part(audio=request_pb2.Audio(samples=inline_tensor("", samples), sample_rate_hz=rate_hz))
    return Piece(part=part)


def given_input(*pieces: Piece, begins_s: float = 0.0) -> PromptInput:
    joined = PromptInput(begins_s)
    for piece in pieces:
        joined.append(piece)
    return joined


def samples_of(turn: PromptInput) -> list[float]:
    pieces = [piece.part.audio for piece in turn.pieces if piece.part.HasField("audio")]
    return [value for each in pieces for value in read_samples(each).tolist()]


def test_texts_are_joined() -> None:
    messages = given_input(text("Hel"), text("lo")).messages()
    assert messages == [request_pb2.Message(role=request_pb2.ROLE_USER, content="Hello")]


def test_audio_of_the_same_kind_is_joined() -> None:
    (message,) = given_input(audio(1, 2), audio(3), text("!"), audio(4, rate_hz=2000), audio(5)).messages()
    assert [part.WhichOneof("content") for part in message.parts] == ["audio", "text", "audio", "audio"]
    assert read_samples(message.parts[0].audio).tolist() == [1, 2, 3]


def test_audio_with_several_channels_is_joined_along_time() -> None:
    (message,) = given_input(audio(1, 2, channels=2), audio(3, channels=2)).messages()
    assert read_samples(message.parts[0].audio).tolist() == [[1, 1], [2, 2], [3, 3]]


def test_a_message_ends_the_message_of_the_user() -> None:
    result = request_pb2.Message(role=request_pb2.ROLE_TOOL, content="sunny", tool_call_id="1")
    messages = given_input(text("one"), Piece(message=result), text("two"), text("three")).messages()
    assert [message.content for message in messages] == ["one", "sunny", "twothree"]


@given(st.lists(st.integers(0, 5), max_size=6), st.integers(-2, 32))
def test_audio_is_split_at_a_sample(sizes: list[int], at: int) -> None:
    values = list(range(sum(sizes)))
    pieces = [audio(*values[sum(sizes[:i]) : sum(sizes[: i + 1])]) for i in range(len(sizes))]
    turn = given_input(*pieces, begins_s=10.0)
    rest = turn.split(10.0 + at / RATE_HZ)
    cut = min(max(at, 0), len(values))
    assert (samples_of(turn), samples_of(rest)) == (values[:cut], values[cut:])
    assert (turn.size_bytes, rest.size_bytes) == (4 * cut, 4 * (len(values) - cut))


def test_texts_before_dropped_audio_remain() -> None:
    turn = given_input(text("listen:"), audio(1, 2, 3), audio(4))
    turn.drop_audio(until_s=2 / RATE_HZ)
    assert [message.parts[0].text for message in turn.messages()] == ["listen:"]
    assert turn.begins_s == 2 / RATE_HZ
    assert samples_of(turn) == [3, 4]


def test_pieces_beyond_the_window_are_rejected() -> None:
    credit = Credit(10)
    credit.add(6, packet_bytes=6)
    with pytest.raises(OverloadedError):
        credit.check(5)
    credit.check(4)


def test_the_limit_is_raised_after_half_of_the_window() -> None:
    credit = Credit(10)
    credit.add(4)
    assert not credit.raise_limit()
    credit.add(1)
    assert credit.raise_limit()
    assert credit.limit_bytes == 15


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), max_size=9), st.data())
def test_consumed_packets_return_the_sizes_of_their_pieces(pieces: list[tuple[int, int]], data: st.DataObject) -> None:
    credit = Credit(1000)
    for size_bytes, packet_bytes in pieces:
        credit.add(size_bytes, packet_bytes=packet_bytes)
    left = sum(packet_bytes for _, packet_bytes in pieces)
    while left:
        part = data.draw(st.integers(1, left))
        credit.consume(part)
        left -= part
    credit.add(500)
    assert credit.raise_limit()
    assert credit.limit_bytes == 1000 + credit.received_bytes


# -- answers

TWO = """
pipeline: two
main_stage: a
stages:
  a: {engine: fake, function: source}
  b: {engine: fake, function: relay}
edges: [{from: a, to: b}]
outputs: {spoken: b, text: a}
"""


HEARD = {0: "", 2: "", 3: "one", 4: "one", 6: "one", 7: "one two", 13: "one two three", 99: "one two three"}


@pytest.mark.parametrize(("length", "heard"), HEARD.items())
def test_an_answer_is_cut_at_the_end_of_a_word(length: int, heard: str) -> None:
    assert shorten("one two three", length=length) == heard


async def test_the_text_is_cut_at_the_share_of_another_output(tmp_path: Path) -> None:
    async with chatting(tmp_path, TWO) as chat:
        chat.commit("hello")
        chat.request(1).emit("one two three four")
        chat.request(1).emit("0123456789", name="spoken")
        await settle()
        chat.send(interrupt={})
        chat.send(truncate={"turn": 1, "positions": [{"name": "spoken", "position": 5}]})
        await settle()
    assert chat.last("truncated").truncated.answer == "one two"


async def test_a_truncation_never_lengthens_an_answer(chat: Chat) -> None:
    await chat.turn(1, "hello", "one two")
    for position in (3, 7):
        chat.send(truncate={"turn": 1, "positions": [{"name": "text", "position": position}]})
    await settle()
    assert [each.truncated.answer for each in chat.received if each.HasField("truncated")] == ["one", "one"]


ANSWER = "Zoë 🙂 e\u0301 €"


@pytest.mark.parametrize("restored", [False, True])
async def test_a_text_is_cut_at_bytes_between_characters(chat: Chat, restored: bool) -> None:
    if restored:
        message = request_pb2.Message(role=request_pb2.ROLE_ASSISTANT, content=ANSWER)
        chat.send(seq=0, restore=orchestrator_pb2.TurnRestore(turn=1, messages=[message]))
    else:
        await chat.turn(1, "hello", ANSWER)
    for position in range(len(ANSWER.encode()), -1, -1):
        chat.send(truncate={"turn": 1, "positions": [{"name": "text", "position": position}]})
        await settle()
        heard = ANSWER.encode()[:position].decode(errors="ignore")
        if len(heard.encode()) == position:
            assert chat.last("truncated").truncated.answer == heard
        else:
            assert await chat.rejection() == "INVALID_POSITION"


async def test_an_interruption_states_and_keeps_what_was_sent_in_bytes(chat: Chat) -> None:
    chat.commit("hello")
    chat.request(1).emit("Zoë ")
    chat.request(1).emit("🙂")
    await settle()
    chat.send(interrupt={})
    chat.commit("more")
    await settle()
    (sent,) = chat.last("interrupted").interrupted.positions
    assert (sent.position, chat.prompt(2)) == (9, ["hello", "Zoë 🙂", "more"])


@pytest.mark.parametrize("ended", [False, True], ids=["running", "ended"])
async def test_a_client_within_a_character_is_rejected_and_loses_nothing(chat: Chat, ended: bool) -> None:
    chat.commit("hello")
    chat.request(1).emit("Zoë")
    await settle()
    await chat.leave()
    chat.request(1).emit("🙂")
    if ended:
        chat.request(1).end()
        await settle()
    for position in (3, 6):
        positions = [{"name": "text", "position": position}]
        with raises(InvalidRequestError, reason="INVALID_POSITION"):
            await chat.reattach(linger_s=60, turn=1, next_positions=positions)
            await settle()
            raise chat.error or AssertionError("the call must end with an error")
        # A running answer reaches the position only later.
        assert chat.session.is_attached is not ended
        if not ended:
            await chat.leave()
    await chat.reattach(linger_s=60, turn=1, next_positions=[{"name": "text", "position": 4}])
    if not ended:
        chat.request(1).end()
        await settle()
    assert [each.generated.output.text for each in chat.received if each.generated.output.text] == ["🙂"]
    assert chat.last("ended").ended.answer == "Zoë🙂"
    assert not chat.last("ended").ended.HasField("error")


@pytest.mark.parametrize("answered", [False, True])
async def test_a_named_text_is_cut_at_its_position(chat: Chat, answered: bool) -> None:
    await chat.turn(1, "one", "answer")
    turns = ["one", "ans"]
    if answered:
        chat.commit("two")
        turns += ["two", ""]
    chat.send(truncate={"turn": 1, "positions": [{"name": "text", "position": 3}]})
    if answered:
        await chat.answer(2)
    chat.commit("more")
    await settle()
    assert chat.prompt(2 + answered) == [*turns, "more"]
    assert chat.last("truncated").truncated.answer == "ans"


async def test_the_text_of_the_main_stage_is_preferred(tmp_path: Path) -> None:
    async with chatting(tmp_path, TWO) as chat:
        await settle()
    assert chat.received[0].opened.transcript_output == "text"


def test_the_size_of_a_transcript_follows_its_turns() -> None:
    transcript = Transcript()
    turn = TranscriptTurn(b"12", "é")
    transcript.add(turn)
    assert transcript.size_bytes == 4
    assert transcript.pop() == turn
    assert transcript.size_bytes == 0


def test_a_restored_turn_without_an_answer_has_an_empty_one() -> None:
    message = request_pb2.Message(role=request_pb2.ROLE_USER, content="hello")
    assert restored_turn([message]).answer == ""
    assert restored_turn([]).messages == b""
