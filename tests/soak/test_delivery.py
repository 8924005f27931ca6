"""Each kind of flaw of a delivery is distinguished from the others."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagemesh.client.responses import Admitted, AudioChunk, Finished, TensorOutput, Text, Timings
from tests.soak.delivery import Arrivals, Delivery, Flaws, flaws
from tests.soak.workload import Request, requests, units

UNITS = [f"Step {number} is {number:08x}. ".encode() for number in range(12)]
REQUEST = Request("hello", seed=1, steps=4)
FINISHED = Finished(({},), Timings(0.0, None, 0.0))


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ([0, 1, 2, 3], Flaws()),
        ([0, 1, 1, 2, 3], Flaws(duplicated=1)),
        ([0, 1, 2, 0, 1, 2, 3], Flaws(duplicated=3)),
        ([0, 1, 3], Flaws(lost=1)),
        ([0, 1], Flaws(lost=2)),
        ([], Flaws(lost=4)),
        ([0, 2, 1, 3], Flaws(reordered=1)),
        ([1, 2, 3, 0], Flaws(reordered=1)),
        ([0, 1, 2, 3, 11], Flaws(altered=1)),
        ([0, 11, 2, 3], Flaws(lost=1, altered=1)),
    ],
)
def test_each_flaw_is_named(numbers: list[int], expected: Flaws) -> None:
    assert flaws(b"".join(UNITS[number] for number in numbers), UNITS[:4]) == expected


def test_a_cut_unit_is_lost_and_its_remainder_altered() -> None:
    assert flaws(b"".join(UNITS)[:-3], UNITS) == Flaws(lost=1, altered=1)


def test_one_byte_that_differs_is_found() -> None:
    received = bytearray(b"".join(UNITS))
    received[30] ^= 1
    assert flaws(bytes(received), UNITS) == Flaws(lost=1, altered=1)


@given(st.lists(st.integers(0, 11), max_size=24))
def test_only_all_units_in_order_are_without_flaws(numbers: list[int]) -> None:
    received = b"".join(UNITS[number] for number in numbers)
    assert bool(flaws(received, UNITS)) == (numbers != list(range(12)))


@given(st.lists(st.integers(0, 11), max_size=24))
def test_units_are_counted_once_each(numbers: list[int]) -> None:
    found = flaws(b"".join(UNITS[number] for number in numbers), UNITS)
    assert found.altered == 0
    assert len(numbers) - found.duplicated + found.lost == len(UNITS)


def test_the_units_of_a_request_differ_in_every_output() -> None:
    for request in requests(1, count=20, steps=(20, 60)):
        for made in units(request).values():
            assert len(set(made)) == len(made) == request.steps


def _delivered(*, without: int = 0, cut: int = 1) -> Delivery:
    """A delivery of four units whose pieces are cut in other places than the units."""
    delivery = Delivery(REQUEST, {"text": UNITS[:4], "frames": UNITS[:4], "audio": UNITS[:4]})
    delivery.add(Admitted("r", 1, ({},)))
    whole = b"".join(UNITS[:4])
    for at in range(0, len(whole), cut * 4):
        piece = whole[at : at + cut * 4]
        delivery.add(Text("text", piece.decode()))
        delivery.add(TensorOutput("frames", "frames", np.frombuffer(piece, np.uint8)))
        delivery.add(AudioChunk("audio", np.frombuffer(piece, np.float32), 24_000))
    if not without:
        delivery.add(FINISHED)
    return delivery


def test_outputs_may_be_cut_anywhere() -> None:
    delivery = _delivered(cut=3)
    assert delivery.whole()
    assert not delivery.flaws()


def test_a_request_without_its_end_is_incomplete() -> None:
    assert not _delivered(without=1).whole()


def test_output_after_the_end_is_a_flaw() -> None:
    delivery = _delivered()
    delivery.add(FINISHED)
    assert delivery.flaws() == Flaws(altered=1)
    assert not delivery.whole()


def test_a_failed_request_is_compared_as_far_as_it_got() -> None:
    delivery = Delivery(REQUEST, {"text": UNITS})
    delivery.error = "it failed"
    delivery.add(Text("text", b"".join(UNITS[:2]).decode() + UNITS[2].decode()[:5]))
    assert not delivery.flaws()
    delivery.add(Text("text", UNITS[2].decode()))
    assert delivery.flaws()


def test_a_pause_ends_with_the_longest_gap() -> None:
    arrivals = Arrivals([b"x"] * 7, [1.0, 1.1, 1.2, 1.25, 2.0, 2.3, 9.0])
    assert arrivals.pause_s(1.15) == pytest.approx(0.85)
    assert arrivals.pause_s(8.0) == pytest.approx(1.0)
    assert arrivals.pause_s(9.5) is None


def test_a_usual_pause_is_not_one_of_the_fault() -> None:
    usual = Arrivals([b"ab", b"cd", b"ef", b"gh"], [0.0, 0.1, 2.1, 2.2])
    late = Arrivals([b"ab", b"cd", b"ef", b"gh"], [10.0, 10.1, 12.6, 12.7])
    assert late.pause_s(10.2, usual=usual) == pytest.approx(0.5)
    assert late.pause_s(12.3, usual=usual) == pytest.approx(0.3)
    assert usual.pause_s(0.5, usual=usual) == pytest.approx(0.0)
    early = Arrivals([b"abcde", b"f", b"gh"], [10.0, 12.6, 12.7])
    assert early.pause_s(10.2, usual=usual) == pytest.approx(0.5)
    assert late.pause_s(10.2) == pytest.approx(2.4)
