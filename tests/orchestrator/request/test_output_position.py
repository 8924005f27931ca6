import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagemesh.common.errors import InvalidChunkError
from stagemesh.common.requests.output_position import Position, after, length_of
from stagemesh.common.wire.tensors import inline_tensor, read_inline
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


def _audio(samples: int, *, channels: int = 0) -> Output:
    shape = (samples, channels) if channels else (samples,)
    tensor = inline_tensor("samples", np.arange(np.prod(shape), dtype=np.float32).reshape(shape))
    return Output(name="audio", position=4, audio=Audio(samples=tensor, sample_rate_hz=24000))


@given(text=st.text(max_size=20), position=st.integers(0, 25))
def test_text_is_cut_between_code_points(text: str, position: int) -> None:
    rest = after(Output(name="text", position=7, text=text), position)
    assert (rest.text if rest is not None else "") == text[position:]
    assert rest is None or (rest.name, rest.position) == ("text", 7 + position)


def test_tokens_keep_their_logprobs() -> None:
    logprobs = [TokenLogprobs(sampled=TokenLogprob(logprob=-each)) for each in (1, 2, 3)]
    rest = after(Output(token_ids=TokenIds(ids=[5, 6, 7]), logprobs=logprobs), 1)
    assert rest is not None
    assert list(rest.token_ids.ids) == [6, 7]
    assert [each.sampled.logprob for each in rest.logprobs] == [-2, -3]


def test_text_keeps_the_logprobs_of_the_tokens_that_begin_in_it() -> None:
    logprobs = [TokenLogprobs(position=position) for position in (10, 12, 12, 13)]
    fragment = Output(name="text", position=10, text="abcd", logprobs=logprobs)
    kept = [after(fragment, count) for count in (1, 2, 3)]
    assert [[each.position for each in rest.logprobs] for rest in kept if rest] == [[12, 12, 13], [12, 12, 13], [13]]


def test_a_replay_with_other_fragments_gives_each_logprob_once() -> None:
    received = Position()
    first = Output(name="text", text="abc", logprobs=[TokenLogprobs(position=each) for each in (0, 1, 1)])
    assert received.remainder(first) == first
    cuts = [(0, "a", [0]), (1, "bcd", [1, 1, 3]), (4, "e", [4])]
    rest = [
        received.remainder(
            Output(
                name="text", position=begin, text=text, logprobs=[TokenLogprobs(position=each) for each in positions]
            )
        )
        for begin, text, positions in cuts
    ]
    assert [(each.text, [token.position for token in each.logprobs]) for each in rest if each] == [
        ("d", [3]),
        ("e", [4]),
    ]


@pytest.mark.parametrize("channels", [0, 2])
def test_audio_is_cut_between_samples(channels: int) -> None:
    whole = _audio(5, channels=channels)
    rest = after(whole, 2)
    assert rest is not None
    np.testing.assert_array_equal(read_inline(rest.audio.samples), read_inline(whole.audio.samples)[2:])
    assert (rest.audio.sample_rate_hz, rest.position, length_of(rest), length_of(whole)) == (24000, 6, 3, 5)


def test_a_tensor_is_cut_between_rows() -> None:
    tensor = np.arange(24, dtype=np.int16).reshape(4, 3, 2)
    rest = after(Output(tensor=inline_tensor("codes", tensor)), 3)
    assert rest is not None
    np.testing.assert_array_equal(read_inline(rest.tensor), tensor[3:])
    assert rest.tensor.name == "codes"


@pytest.mark.parametrize(
    "whole",
    [Output(image=Media(data=b"png", last=True)), Output(tensor=inline_tensor("loss", np.ones((), np.float32)))],
    ids=["end of an image", "tensor without axes"],
)
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


def test_the_end_of_an_output_remains() -> None:
    finish = Finish(reason=FINISH_REASON_LENGTH)
    rest = after(Output(name="text", text="abc", finish=finish), 3)
    assert rest == Output(name="text", position=3, finish=finish)
