"""The client's position and the orchestrator's resumption together: no output is lost or repeated."""

from itertools import accumulate

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from stagemesh.client import (
    AudioChunk,
    Event,
    Image,
    MediaChunk,
    OutputFinished,
    RetryPolicy,
    TensorOutput,
    Text,
    Tokens,
)
from stagemesh.client.received_events import ClientPosition
from stagemesh.common.requests.output_position import length_of
from stagemesh.common.wire.tensors import inline_tensor
from stagemesh.orchestrator.request.output_record import Resumption
from stagemesh.v1.orchestrator_pb2 import AdmittedChoice, GenerateRequest, GenerateResponse, RequestAdmitted
from stagemesh.v1.request_pb2 import FINISH_REASON_END as END
from stagemesh.v1.request_pb2 import Audio, Finish, Media, Output, TokenIds

TEXT = "Zoë sagt: 🙂 e\u0301!"
TOKENS = tuple(range(17))
SAMPLES = np.linspace(-1, 1, 23, dtype=np.float32)
ROWS = np.arange(26, dtype=np.int16).reshape(13, 2)
PICTURES = tuple(bytes([number] * 7) for number in range(3))
FILM = bytes(range(40))


def _cut(draw: st.DrawFn, length: int) -> list[slice]:
    """Cuts `length` units into pieces at random. Pieces may be empty."""
    cuts = sorted(draw(st.lists(st.integers(0, length), max_size=5)))
    return [slice(start, end) for start, end in zip([0, *cuts], [*cuts, length], strict=True)]


def _parts(draw: st.DrawFn, length: int) -> list[slice]:
    """Cuts a file into parts at random. A stage that restarts sends its first parts again."""
    parts = [piece for piece in _cut(draw, length) if piece.start < piece.stop]
    return parts[: draw(st.integers(0, len(parts) - 1))] + parts


@st.composite
def lives(draw: st.DrawFn) -> list[Output]:
    """All outputs of a request, cut and interleaved at random as each orchestrator may do."""
    pieces = {
        "text": [Output(name="text", text=TEXT[piece]) for piece in _cut(draw, len(TEXT))],
        "codes": [Output(name="codes", token_ids=TokenIds(ids=TOKENS[piece])) for piece in _cut(draw, len(TOKENS))],
        "sound": [
            Output(name="sound", audio=Audio(samples=inline_tensor("s", SAMPLES[piece]), sample_rate_hz=8000))
            for piece in _cut(draw, len(SAMPLES))
        ],
        "rows": [Output(name="rows", tensor=inline_tensor("r", ROWS[piece])) for piece in _cut(draw, len(ROWS))],
        "picture": [
            Output(
                name="picture",
                image=Media(data=data[piece], offset=piece.start, last=piece.stop == len(data)),
            )
            for data in PICTURES
            for piece in _parts(draw, len(data))
        ],
        "film": [
            Output(name="film", media=Media(data=FILM[piece], offset=piece.start)) for piece in _cut(draw, len(FILM))
        ],
    }
    for made in pieces.values():
        begins = accumulate(map(length_of, made), initial=0)
        for output, begin in zip(made, begins, strict=False):
            output.position = begin
        made.append(Output(name=made[0].name, position=sum(map(length_of, made)), finish=Finish(reason=END)))
    names = draw(st.permutations([name for name, made in pieces.items() for _ in made]))
    return [pieces[name].pop(0) for name in names]


@given(rounds=st.lists(st.tuples(lives(), st.integers(0, 30)), max_size=5), last=lives())
def test_a_caller_gets_every_output_once_however_often_its_call_breaks(
    rounds: list[tuple[list[Output], int]], last: list[Output]
) -> None:
    delivery, received = ClientPosition(GenerateRequest(), RetryPolicy()), list[Event]()
    for outputs, lost_after in [*rounds, (last, len(last))]:
        positions = delivery.request().next_positions
        resumption = Resumption({(each.name, each.index): each.position for each in positions})
        rests = [rest for output in outputs if (rest := resumption.remainder(output)) is not None]
        for rest in rests[:lost_after]:
            received += delivery.take(GenerateResponse(output=rest))
        delivery.note_lost()
    assert "".join(event.delta for event in received if isinstance(event, Text)) == TEXT
    assert [number for event in received if isinstance(event, Tokens) for number in event.ids] == list(TOKENS)
    assert [event.data for event in received if isinstance(event, Image)] == list(PICTURES)
    film = [event for event in received if isinstance(event, MediaChunk)]
    assert b"".join(event.data for event in film) == FILM
    assert all(FILM[event.offset :].startswith(event.data) for event in film)
    sounds = [event.samples for event in received if isinstance(event, AudioChunk)]
    np.testing.assert_array_equal(np.concatenate(sounds), SAMPLES)
    rows = [event.tensor for event in received if isinstance(event, TensorOutput)]
    np.testing.assert_array_equal(np.concatenate(rows), ROWS)
    ended = [event.output for event in received if isinstance(event, OutputFinished)]
    assert sorted(ended) == ["codes", "film", "picture", "rows", "sound", "text"]


def _admitted(generation: str) -> GenerateResponse:
    admitted = RequestAdmitted(request_id="r", choices=[AdmittedChoice()], generation=generation)
    return GenerateResponse(admitted=admitted)


def test_a_client_with_outputs_continues_in_their_generation() -> None:
    position = ClientPosition(GenerateRequest(request_id="r"), RetryPolicy())
    position.take(_admitted("old-1"))
    assert not position.request().generation
    position.take(_admitted("new-1"))
    position.take(GenerateResponse(output=Output(name="text", text="Once")))
    assert position.request().generation == "new-1"
