from itertools import accumulate

from hypothesis import given
from hypothesis import strategies as st

from stagemesh.orchestrator.request.output_record import Resumption
from stagemesh.v1.request_pb2 import Media, Output

PIECES = st.lists(st.text(max_size=6), max_size=8)


def _outputs(pieces: list[str]) -> list[Output]:
    begins = accumulate(map(len, pieces), initial=0)
    return [Output(name="text", position=begin, text=text) for begin, text in zip(begins, pieces, strict=False)]


@given(pieces=PIECES, position=st.integers(0, 60))
def test_everything_after_a_position_arrives(pieces: list[str], position: int) -> None:
    resumption = Resumption({("text", 0): position})
    rests = [resumption.remainder(output) for output in _outputs(pieces)]
    assert "".join(rest.text for rest in rests if rest is not None) == "".join(pieces)[position:]


@given(pieces=PIECES, again=PIECES, received=st.integers(0, 8))
def test_pieces_may_be_cut_differently_the_second_time(pieces: list[str], again: list[str], received: int) -> None:
    text = "".join(pieces)
    cuts = [0, *accumulate(map(len, again))]
    others = [text[start:end] for start, end in zip(cuts, [*cuts[1:], len(text)], strict=True)]
    had = "".join(pieces[:received])
    resumption = Resumption({("text", 0): len(had)})
    rests = [resumption.remainder(output) for output in _outputs(others)]
    assert had + "".join(rest.text for rest in rests if rest is not None) == text


def test_an_output_without_a_position_starts_at_its_beginning() -> None:
    resumption = Resumption({("text", 0): 1, ("other", 0): 0})
    assert resumption.remainder(Output(name="text", text="a")) is None
    assert resumption.remainder(Output(name="other", text="a")) is not None
    assert resumption.remainder(Output(name="third", text="a")) is not None


def test_received_images_are_not_repeated() -> None:
    resumption = Resumption({("image", 0): 2})
    rests = [
        resumption.remainder(Output(name="image", position=number, image=Media(data=bytes([number]), last=True)))
        for number in range(3)
    ]
    assert [rest is not None for rest in rests] == [False, False, True]
