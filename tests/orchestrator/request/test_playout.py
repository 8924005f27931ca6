"""The continuity of a stream of audio."""

import pytest

from stagemesh.common.wire.telemetry import Playout


@pytest.mark.parametrize(
    ("parts", "total_s", "longest_s"),
    [
        ([(1.0, 0.5)], 0.0, 0.0),
        ([(1.0, 0.5), (1.2, 0.5), (1.9, 0.5)], 0.0, 0.0),
        ([(1.0, 0.5), (1.75, 0.5), (2.25, 0.5), (2.8, 0.5)], 0.3, 0.25),
        # After an underrun, the listener continues later.
        ([(1.0, 0.5), (2.5, 0.5), (2.9, 0.5), (3.4, 0.5)], 1.0, 1.0),
    ],
)
def test_a_listener_waits_for_parts_that_come_late(
    parts: list[tuple[float, float]], total_s: float, longest_s: float
) -> None:
    playout = Playout(parts[0][0])
    for at_s, duration_s in parts:
        playout.add(at_s, duration_s=duration_s)
    assert playout.underrun_s == pytest.approx(total_s)
    assert playout.longest_underrun_s == pytest.approx(longest_s)
