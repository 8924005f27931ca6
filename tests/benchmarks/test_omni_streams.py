from pathlib import Path

import pytest

from benchmarks.omni_streams.playout import Chunk, first_playable_s, worst_underrun_s
from benchmarks.omni_streams.stamps import Stamps, read, token_hops_ms, vocoder_hops_ms

MS = 1_000_000


def stamps(place: str, *passed: tuple[int, int]) -> Stamps:
    """Returns the stamps of request 1: pairs of a number of rows and a time in milliseconds."""
    return Stamps(place, 1, [rows for rows, _ in passed], [ms * MS for _, ms in passed])


def by_place(*each: Stamps) -> dict[str, dict[int, Stamps]]:
    return {one.place: {one.seed: one} for one in each}


def test_audio_that_arrives_in_time_is_playable_at_once() -> None:
    chunks = [Chunk(0.1, 0.3), Chunk(0.4, 0.6), Chunk(0.9, 0.6)]
    assert first_playable_s(chunks) == 0.1
    assert worst_underrun_s(chunks) == 0


def test_audio_that_would_starve_before_the_next_chunk_is_not_playable() -> None:
    chunks = [Chunk(0.1, 0.1), Chunk(0.5, 0.1), Chunk(0.8, 0.4), Chunk(0.9, 0.1)]
    assert first_playable_s(chunks) == 0.8


def test_the_last_chunk_is_always_playable() -> None:
    assert first_playable_s([Chunk(0.1, 0.1), Chunk(5.0, 0.1)]) == 5.0


def test_a_listener_waits_for_late_audio_and_then_plays_all_of_it() -> None:
    # The first chunk is played at 0.2, the second from 0.5 to 1.0, the third one is 0.1 late.
    chunks = [Chunk(0.1, 0.1), Chunk(0.5, 0.5), Chunk(1.1, 0.1)]
    assert worst_underrun_s(chunks) == pytest.approx(0.3)


def test_a_chunk_hops_from_the_emission_that_completes_it_to_the_call() -> None:
    found = by_place(
        stamps("talker out", (0, 1), (1, 10), (2, 20), (4, 30), (6, 40), (7, 50)),
        # The first chunk is cut when further frames have arrived.
        stamps("talker chunks", (2, 31), (5, 40), (7, 98)),
        stamps("code2wav in", (2, 33), (5, 41), (7, 99)),
    )
    # The end of the talker completes the last chunk, so that it has no hop.
    assert vocoder_hops_ms(found, [1]) == [1, 3]


def test_a_token_hops_from_the_emission_of_the_next_one_to_the_talker() -> None:
    found = by_place(
        stamps("thinker out", (1, 10), (2, 20), (3, 30), (4, 40)),
        # The rows of the prompt, and its last row with the first token. The last row is the end marker.
        stamps("talker in", (-1, 5), (0, 22), (1, 31), (2, 45), (3, 60)),
    )
    assert token_hops_ms(found, [1]) == [1, 5]


def test_saved_stamps_of_several_requests_are_read_again(tmp_path: Path) -> None:
    for seed in (1, 2):
        one = Stamps("talker out", seed)
        one.add(3)
        one.add(1)
        one.save(tmp_path)
    found = read(tmp_path)["talker out"]
    assert found.keys() == {1, 2}
    assert found[2].rows == [3, 4]
    assert found[2].times_ns == sorted(found[2].times_ns)
