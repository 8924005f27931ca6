from stagemesh.common.backoff import Backoff

BACKOFF = Backoff(first_s=0.1, longest_s=1.0)


def test_pauses_double_up_to_the_longest() -> None:
    retries = BACKOFF.retries()
    assert [retries.next_s() for _ in range(6)] == [0.1, 0.2, 0.4, 0.8, 1.0, 1.0]


def test_success_resets_the_pause() -> None:
    retries = BACKOFF.retries()
    retries.next_s()
    retries.next_s()
    retries.reset()
    assert retries.next_s() == 0.1


def test_any_number_of_failures_is_bounded() -> None:
    assert BACKOFF.pause_s(100_000) == 1.0
