"""The sentences do not depend on how the text is fragmented."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from stagemesh.connectors.edge import Packet
from stagemesh.services.models.text import Sentences

PARTS = [*"abJD.!?… \n\t\xa0\"”)',;é語", "Dr.", "Mr. ", ". ", "J. K. "]
TEXTS = st.lists(st.sampled_from(PARTS), max_size=40).map("".join)


def _sentences(pieces: list[bytes]) -> list[str]:
    transform = Sentences()
    packets = [out for piece in pieces for out in transform.push(Packet({"text": np.frombuffer(piece, np.uint8)}))]
    return [packet.tensors["text"].tobytes().decode() for packet in [*packets, *transform.finish()]]


@given(text=TEXTS, cuts=st.lists(st.integers(0, 80)))
@settings(max_examples=500, deadline=None)
def test_fragmentation_does_not_change_the_sentences(text: str, cuts: list[int]) -> None:
    data = text.encode()
    places = sorted({min(cut, len(data)) for cut in cuts})
    pieces = [data[start:end] for start, end in zip([0, *places], [*places, len(data)], strict=True)]
    assert _sentences(pieces) == _sentences([data])


@given(text=TEXTS)
@settings(max_examples=500, deadline=None)
def test_only_white_space_is_dropped(text: str) -> None:
    assert "".join("".join(_sentences([text.encode()])).split()) == "".join(text.split())


def test_a_sentence_is_emitted_when_the_next_starts() -> None:
    transform = Sentences()
    piece = Packet({"text": np.frombuffer(b"Dr. Smith came. He sa", np.uint8)})
    assert [out.tensors["text"].tobytes() for out in transform.push(piece)] == [b"Dr. Smith came."]


def test_closing_quotes_belong_to_their_sentence() -> None:
    assert _sentences(["She said “no.” Then she left.".encode()]) == ["She said “no.”", "Then she left."]


def test_a_tab_does_not_hide_a_title() -> None:
    assert _sentences([b"So.\tMr. J. Doe"]) == ["So.", "Mr. J. Doe"]
