"""The parts of a text do not depend on how the text is fragmented."""

import numpy as np
import pytest
from hibari import Hibari
from hypothesis import given, settings
from hypothesis import strategies as st

from stagemesh.connectors.packets import Packet
from stagemesh.services.models.text import Clauses, Sentences
from tests.models.vocoding import parts

WORDS = ["Dr.", "Mr. ", ". ", "J. K. ", "etc. ", "done. ", "really? ", "and so it was, "]
PARTS = [*"abJD.!?… \n\t\xa0\"”)',;é語", *WORDS]
TEXTS = st.lists(st.sampled_from(PARTS), max_size=40).map("".join)
TRANSFORMS = pytest.mark.parametrize("transform", [Sentences, Clauses])


def _parts(transform: type[Sentences], pieces: list[bytes]) -> list[str]:
    divider = transform()
    packets = [out for piece in pieces for out in divider.push(Packet({"text": np.frombuffer(piece, np.uint8)}))]
    return [packet.tensors["text"].tobytes().decode() for packet in [*packets, *divider.finish()]]


def _sentences(text: str) -> list[str]:
    return _parts(Sentences, [text.encode()])


def _emitted(transform: type[Sentences], text: str) -> list[str]:
    """Returns the parts that are emitted before the text ends."""
    packets = transform().push(Packet({"text": np.frombuffer(text.encode(), np.uint8)}))
    return [packet.tensors["text"].tobytes().decode() for packet in packets]


@TRANSFORMS
@given(text=TEXTS, cuts=st.lists(st.integers(0, 120)))
@settings(max_examples=500, deadline=None)
def test_fragmentation_does_not_change_the_parts(transform: type[Sentences], text: str, cuts: list[int]) -> None:
    data = text.encode()
    assert _parts(transform, [data[part] for part in parts(len(data), cuts)]) == _parts(transform, [data])


@TRANSFORMS
@given(text=TEXTS)
@settings(max_examples=200, deadline=None)
def test_only_white_space_is_dropped(transform: type[Sentences], text: str) -> None:
    assert "".join("".join(_parts(transform, [text.encode()])).split()) == "".join(text.split())


@TRANSFORMS
@given(text=TEXTS)
@settings(max_examples=200, deadline=None)
def test_no_part_contains_two_sentences_of_hibari(transform: type[Sentences], text: str) -> None:
    assert all(len(Hibari.split_sentences(part)) == 1 for part in _parts(transform, [text.encode()]))


@TRANSFORMS
@pytest.mark.parametrize("text", ["Dr. Smith came. ", "It's over! ", "It is done\n", "Wait... yes?! "])
def test_a_sentence_is_emitted_when_white_space_follows_it(transform: type[Sentences], text: str) -> None:
    assert _emitted(transform, text) == [text.strip()]


@pytest.mark.parametrize("word", ["Dr.", "J.", "etc.", "p.m.", "3.", "well…", "Well...", "“really?”", "(done.)"])
def test_a_mark_within_a_sentence_waits_for_the_next_word(word: str) -> None:
    assert _emitted(Sentences, f"So {word} ") == []
    assert _sentences(f"So {word} and on") == [f"So {word} and on"]


@pytest.mark.parametrize("word", ["Dr.", "J."])
def test_a_name_follows_a_title(word: str) -> None:
    assert _sentences(f"So {word} Doe spoke. Then") == [f"So {word} Doe spoke.", "Then"]


def test_closing_quotes_belong_to_their_sentence() -> None:
    assert _sentences("She said “no.” Then she left.") == ["She said “no.”", "Then she left."]


def test_a_tab_does_not_hide_a_title() -> None:
    assert _sentences("So.\tMr. J. Doe") == ["So.", "Mr. J. Doe"]


def test_a_long_clause_is_emitted_at_its_comma() -> None:
    assert _emitted(Clauses, "When the rain had stopped, we") == ["When the rain had stopped,"]
    assert _emitted(Clauses, "Well, 1,000 times: no; ") == ["Well, 1,000 times: no;"]
