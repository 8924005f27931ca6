"""A split stage whose prefill and decode replicas are killed at random moments of requests."""

import random
from pathlib import Path

import numpy as np
import pytest

from tests.deployment import Deployment, deployed
from tests.system.split_stage import KILLED_TOKENS, check_equal, check_no_blocks, generate_with_kill, write_pipeline

pytestmark = [pytest.mark.soak, pytest.mark.timeout(7200)]

KILLS = 50


def test_no_request_fails_and_no_block_is_leaked(tmp_path: Path) -> None:
    moments, times_s = random.Random(1), dict[str, list[float]]()
    with deployed(write_pipeline(tmp_path), ready_s=400) as up, up.client() as client:
        for number in range(KILLS):
            up.wait(Deployment.all_ready, timeout_s=400)
            victim = ("thinker-prefill-0", "thinker-0")[number % 2]
            # Half of the moments are before the first token.
            after = -1 if moments.random() < 0.5 else moments.randrange(KILLED_TOKENS - 50)
            delay_s = moments.uniform(0.0, 0.3) if after < 0 else 0.0
            result = generate_with_kill(up, client, seed=number, victim=victim, after=after, delay_s=delay_s)
            check_equal(result)
            times_s.setdefault(victim, []).append(result.total_s)
            print(
                f"kill {number}, {victim} after {after} tokens and {delay_s:.2f} s: {result.total_s:.1f} s", flush=True
            )
        up.wait(Deployment.all_ready, timeout_s=400)
        check_no_blocks(up)
    for victim, each in times_s.items():
        print(f"{victim}: {len(each)} kills, median {np.median(each):.1f} s, longest {max(each):.1f} s")
