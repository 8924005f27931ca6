"""A pipeline of two fake stages as real processes, the first of which hands its state over to the second."""

import asyncio
import random
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from stagemesh.services.engines.fake.state_store import StateCounts, read_counts
from tests.deployment import Deployment, deployed, eventually

PIPELINE = """\
pipeline: split
stages:
  prefill: {{engine: fake, function: prefill, options: {{step_s: 0.1, state_bytes: 1000000, state_limit_s: {limit_s}}}}}
  decode:
    engine: fake
    function: decode
    options: {{steps: 20, step_s: 0.01, state_s: {state_s}, recompute: {recompute}, max_running: 2}}
edges: [{{from: prefill, to: decode, connector: {connector}}}]
outputs: {{text: decode}}
"""


def split(
    folder: Path,
    *,
    limit_s: float = 30.0,
    state_s: float = 0.2,
    recompute: bool = False,
    connector: str = "auto",
) -> Path:
    """Writes the pipeline prefill → decode."""
    path = folder / "split.yaml"
    path.write_text(
        PIPELINE.format(
            limit_s=limit_s,
            state_s=state_s,
            recompute=str(recompute).lower(),
            connector=connector,
        )
    )
    return path


def counts(up: Deployment) -> StateCounts:
    """Returns the counts of the states of the present prefill process."""
    return asyncio.run(read_counts(up.process_id("prefill-0")))


def all_released(up: Deployment) -> bool:
    found = counts(up)
    return found.released == found.offered


@pytest.mark.parametrize("connector", ["shm", "grpc"])
def test_state_is_handed_over_and_released_while_its_reader_still_runs(tmp_path: Path, connector: str) -> None:
    with deployed(split(tmp_path, connector=connector)) as up, up.client() as client, ThreadPoolExecutor(8) as pool:
        alone = client.generate("hello", seed=1).result()
        assert alone.text.startswith("Step 0 is ")
        assert {(edge.edge, edge.handed_over_bytes) for edge in alone.finished.edges} == {
            ("prefill->decode", 1_000_000)
        }
        results = list(pool.map(lambda seed: client.generate("hello", seed=seed).result(), range(1, 9)))
        assert results[0].text == alone.text
        assert len({result.text for result in results}) == 8
        assert counts(up) == StateCounts(offered=9, released=9)
        eventually(up.idle, timeout_s=10)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("recompute", [False, True])
def test_no_request_fails_and_no_state_leaks_when_either_side_is_killed(tmp_path: Path, recompute: bool) -> None:
    draw = random.Random(recompute)
    with (
        deployed(split(tmp_path, recompute=recompute)) as up,
        up.client() as client,
        ThreadPoolExecutor(4) as pool,
    ):
        alone = {seed: client.generate("hello", seed=seed).result().text for seed in range(4)}
        for victim in ("prefill-0", "decode-0", "decode-0", "prefill-0", "decode-0", "prefill-0"):
            running = {seed: pool.submit(client.generate("hello", seed=seed).result) for seed in alone}
            # Kills at a random moment of the requests, each of which takes about half a second.
            time.sleep(draw.uniform(0, 0.6))
            up.kill(victim)
            for seed, result in running.items():
                assert result.result(timeout=60).text == alone[seed]
            eventually(up.all_ready, timeout_s=30)
            eventually(lambda: all_released(up), timeout_s=20)
            assert (counts(up).cut_reads, counts(up).refused_reads) == (0, 0)
        eventually(up.idle, timeout_s=20)


def test_cancelled_request_releases_its_state_at_once(tmp_path: Path) -> None:
    with deployed(split(tmp_path, state_s=5.0)) as up, up.client() as client, ThreadPoolExecutor(1) as pool:
        running = pool.submit(client.generate("hello", request_id="r1").result)
        eventually(lambda: counts(up).offered == 1, timeout_s=10)
        client.cancel("r1")
        assert running.exception(timeout=10) is not None
        assert eventually(lambda: all_released(up), timeout_s=10) < 3


def test_ticket_that_expires_in_the_queue_is_recomputed(tmp_path: Path) -> None:
    with (
        deployed(split(tmp_path, limit_s=0.3, state_s=0.25, recompute=True)) as up,
        up.client() as client,
        ThreadPoolExecutor(8) as pool,
    ):
        alone = client.generate("hello", seed=1).result().text
        results = list(pool.map(lambda _: client.generate("hello", seed=1).result().text, range(8)))
        assert set(results) == {alone}
        assert counts(up).cut_reads == 0
        eventually(lambda: all_released(up), timeout_s=5)
