from stagemesh.common.backoff import Backoff, backoff_s


def test_pauses_double_up_to_the_longest() -> None:
    backoff = Backoff(first_s=0.1, longest_s=1.0)
    assert [backoff.next_s() for _ in range(6)] == [0.1, 0.2, 0.4, 0.8, 1.0, 1.0]


def test_success_resets_the_pause() -> None:
    backoff = Backoff(first_s=0.1, longest_s=1.0)
    backoff.next_s()
    backoff.next_s()
    backoff.reset()
    assert backoff.next_s() == 0.1


def test_any_number_of_failures_is_bounded() -> None:
    assert backoff_s(100_000, first_s=0.1, longest_s=2.0) == 2.0
