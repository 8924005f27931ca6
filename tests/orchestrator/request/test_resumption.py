"""Positions in outputs: what a caller has received does not arrive again, and nothing is missing."""

from collections.abc import Iterable
from itertools import accumulate, product

import numpy as np
import pytest
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
from stagemesh.common.errors import InternalError, InvalidChunkError, InvalidRequestError
from stagemesh.common.requests.output_position import Position, after, length_of
from stagemesh.common.wire.tensors import inline_tensor, read_inline
from stagemesh.orchestrator.request.output_record import Resumption
from stagemesh.v1.orchestrator_pb2 import AdmittedChoice, GenerateRequest, GenerateResponse, RequestAdmitted
from stagemesh.v1.request_pb2 import FINISH_REASON_END as END
from stagemesh.v1.request_pb2 import (
    FINISH_REASON_LENGTH,
    Audio,
    Finish,
    Media,
    Output,
    TokenIds,
    TokenLogprob,
    TokenLogprobs,
)
from tests.rpc.call_errors import raises


def test_an_output_without_a_position_starts_at_its_beginning() -> None:
    resumption = Resumption({("text", 0): 1, ("other", 0): 0})
    assert resumption.remainder(Output(name="text", text="a")) is None
    assert resumption.remainder(Output(name="other", text="a")) is not None
    assert resumption.remainder(Output(name="third", text="a")) is not None


def _audio(samples: int, *, channels: int = 0) -> Output:
    shape = (samples, channels) if channels else (samples,)
    tensor = inline_tensor("samples", np.arange(np.prod(shape), dtype=np.float32).reshape(shape))
    return Output(name="audio", position=4, audio=Audio(samples=tensor, sample_rate_hz=24000))


def _text(text: str, logprobs_at: Iterable[int], *, position: int) -> Output:
    """Returns a part of the output "text", with the logprobs of tokens that begin at the given positions."""
    logprobs = [TokenLogprobs(position=each) for each in logprobs_at]
    return Output(name="text", position=position, text=text, logprobs=logprobs)


@given(text=st.text(max_size=20), character=st.integers(0, 25))
def test_text_is_cut_between_characters(text: str, character: int) -> None:
    position = len(text[:character].encode())
    whole = Output(name="text", position=7, text=text)
    rest = after(whole, position)
    assert (rest.text if rest is not None else "") == text[character:]
    assert rest is None or (rest.name, rest.position) == ("text", 7 + position)
    assert length_of(whole) == len(text.encode())


@given(text=st.text(min_size=1, max_size=20), position=st.integers(0, 80))
def test_text_is_never_cut_within_a_character(text: str, position: int) -> None:
    part = Output(name="text", text=text)
    has_end = position in accumulate((len(character.encode()) for character in text), initial=0)
    received, resumption = Position({("text", 0): position}), Resumption({("text", 0): position})
    if has_end or position > length_of(part):
        assert (received.remainder(part) or Output()).text == text.encode()[position:].decode()
        return
    with raises(InternalError, reason="OUTPUT_OUT_OF_ORDER", match=f"{position} is within a character"):
        received.remainder(part)
    assert received.counts == {("text", 0): position}, "the receiver must not advance"
    with raises(InvalidRequestError, reason="INVALID_POSITION", match=f"position {position} is within"):
        resumption.remainder(part)


def test_a_replay_is_cut_at_every_boundary() -> None:
    ends = list(accumulate((len(character.encode()) for character in TEXT), initial=0))
    for (first, head), (second, cut) in product(enumerate(ends), repeat=2):
        received = Position()
        received.remainder(Output(name="text", text=TEXT[:first]))
        parts = [Output(name="text", text=TEXT[:second]), Output(name="text", position=cut, text=TEXT[second:])]
        rests = [rest for part in parts if (rest := received.remainder(part)) is not None]
        assert "".join(rest.text for rest in rests) == TEXT[first:]
        assert all(rest.position >= head for rest in rests)
        assert received.counts["text", 0] == ends[-1]


def test_tokens_keep_their_logprobs() -> None:
    logprobs = [TokenLogprobs(sampled=TokenLogprob(logprob=-each)) for each in (1, 2, 3)]
    rest = after(Output(token_ids=TokenIds(ids=[5, 6, 7]), logprobs=logprobs), 1)
    assert rest is not None
    assert list(rest.token_ids.ids) == [6, 7]
    assert [each.sampled.logprob for each in rest.logprobs] == [-2, -3]


def test_text_keeps_the_logprobs_of_the_tokens_that_begin_in_it() -> None:
    fragment = _text("abcd", (10, 12, 12, 13), position=10)
    kept = [after(fragment, count) for count in (1, 2, 3)]
    assert [[each.position for each in rest.logprobs] for rest in kept if rest] == [[12, 12, 13], [12, 12, 13], [13]]


def test_a_replay_with_other_fragments_gives_each_logprob_once() -> None:
    received = Position()
    first = _text("aéc", (0, 1, 1), position=0)
    assert received.remainder(first) == first
    cuts = [(0, "a", [0]), (1, "éc🙂", [1, 1, 4]), (8, "e", [8])]
    rest = [received.remainder(_text(text, positions, position=begin)) for begin, text, positions in cuts]
    found = [(each.text, [token.position for token in each.logprobs]) for each in rest if each]
    assert found == [("🙂", [4]), ("e", [8])]


@pytest.mark.parametrize("channels", [0, 2])
def test_audio_is_cut_between_samples(channels: int) -> None:
    whole = _audio(5, channels=channels)
    rest = after(whole, 2)
    assert rest is not None
    np.testing.assert_array_equal(read_inline(rest.audio.samples), read_inline(whole.audio.samples)[2:])
    assert (rest.audio.sample_rate_hz, rest.position, length_of(rest), length_of(whole)) == (24000, 6, 3, 5)


_UNITS = {
    "end of an image": Output(image=Media(data=b"png", last=True)),
    "tensor without axes": Output(tensor=inline_tensor("loss", np.ones((), np.float32))),
}


@pytest.mark.parametrize("whole", _UNITS.values(), ids=_UNITS)
def test_an_image_or_scalar_is_one_unit(whole: Output) -> None:
    assert (length_of(whole), after(whole, 0), after(whole, 1)) == (1, whole, None)


def test_nothing_remains_of_a_received_piece() -> None:
    assert after(_audio(5), 5) is None
    assert after(Output(text=""), 1) is None
    assert after(Output(), 1) is None


def test_a_tensor_with_a_wrong_size_is_not_cut() -> None:
    whole = _audio(5)
    whole.audio.samples.shape[:] = [6]
    with pytest.raises(InvalidChunkError, match="24 bytes"):
        after(whole, 1)


def test_a_damaged_part_is_not_another_text() -> None:
    whole = _audio(5)
    whole.audio.samples.shape[:] = [6]
    with pytest.raises(InvalidChunkError, match="24 bytes"):
        Position({("audio", 0): 5}).remainder(whole)


def test_the_end_of_an_output_remains() -> None:
    finish = Finish(reason=FINISH_REASON_LENGTH)
    rest = after(Output(name="text", text="abc", finish=finish), 3)
    assert rest == Output(name="text", position=3, finish=finish)


TEXT = "Zoë: 🙂 e\u0301 5 € 👩\u200d🚀!"
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
        "text": [Output(text=TEXT[piece]) for piece in _cut(draw, len(TEXT))],
        "codes": [Output(token_ids=TokenIds(ids=TOKENS[piece])) for piece in _cut(draw, len(TOKENS))],
        "sound": [
            Output(audio=Audio(samples=inline_tensor("s", SAMPLES[piece]), sample_rate_hz=8000))
            for piece in _cut(draw, len(SAMPLES))
        ],
        "rows": [Output(tensor=inline_tensor("r", ROWS[piece])) for piece in _cut(draw, len(ROWS))],
        "picture": [
            Output(image=Media(data=data[piece], offset=piece.start, last=piece.stop == len(data)))
            for data in PICTURES
            for piece in _parts(draw, len(data))
        ],
        "film": [Output(media=Media(data=FILM[piece], offset=piece.start)) for piece in _cut(draw, len(FILM))],
    }
    for name, made in pieces.items():
        begins = accumulate(map(length_of, made), initial=0)
        for output, begin in zip(made, begins, strict=False):
            output.name, output.position = name, begin
        made.append(Output(name=name, position=sum(map(length_of, made)), finish=Finish(reason=END)))
    names = draw(st.permutations([name for name, made in pieces.items() for _ in made]))
    return [pieces[name].pop(0) for name in names]


@given(rounds=st.lists(st.tuples(lives(), st.integers(0, 30)), max_size=5), last=lives())
def test_a_caller_gets_every_output_once(rounds: list[tuple[list[Output], int]], last: list[Output]) -> None:
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
