"""A pipeline of two fake stages, the first of which hands its state over to the second."""

import asyncio
import random
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from stagemesh.client import ResponseStream
from stagemesh.fake_engine.engine import FakeEngine
from stagemesh.fake_engine.state_store import StateCounts, read_counts
from tests.deployment import Deployment, deployed, eventually
from tests.local_mesh import LocalMesh, local_mesh
from tests.system.pipelines import pipeline_file

PIPELINE = """\
pipeline: split
main_stage: decode
stages:
  prefill: {{engine: fake, function: prefill, options: {{step_s: 0.1, state_bytes: 1000000, state_limit_s: {limit_s}}}}}
  decode:
    engine: fake
    function: decode
    options: {{steps: 20, step_s: 0.01, state_s: {state_s}, max_running: 2}}
  computing:
    engine: fake
    function: decode
    options: {{steps: 20, step_s: 0.01, state_s: {state_s}, max_running: 2, recompute: true}}
edges: [{{from: prefill, to: decode, connector: {connector}}}, {{from: prefill, to: computing}}]
outputs: {{text: decode, computed: computing}}
"""


def split(folder: Path, *, limit_s: float = 30.0, state_s: float = 0.2, connector: str = "auto") -> Path:
    """Writes the pipeline prefill → decode, and prefill → computing, which may compute the state itself."""
    return pipeline_file(folder, PIPELINE.format(limit_s=limit_s, state_s=state_s, connector=connector))


def counts(up: Deployment | LocalMesh) -> StateCounts:
    """Returns the counts of the states of the present engine of prefill."""
    if isinstance(up, Deployment):
        return asyncio.run(read_counts(up.process_id("prefill-0")))
    engine = up.stages["prefill-0"].runtime.engine
    assert isinstance(engine, FakeEngine)
    return engine.states.counts


def all_released(up: Deployment | LocalMesh) -> bool:
    found = counts(up)
    return found.released == found.offered


@pytest.mark.parametrize("connector", ["shm", "grpc"])
def test_state_is_handed_over_and_released_while_its_reader_still_runs(tmp_path: Path, connector: str) -> None:
    with local_mesh(split(tmp_path, connector=connector)) as up, up.client() as client, ThreadPoolExecutor(8) as pool:
        alone = client.generate("hello", seed=1, outputs=["text"]).result()
        assert alone.text.startswith("Step 0 is ")
        handed_over = {(edge.edge, edge.handed_over_bytes) for edge in alone.finished.edges}
        assert handed_over == {("prefill->decode", 1_000_000)}
        requests = [client.generate("hello", seed=seed, outputs=["text"]) for seed in range(1, 9)]
        texts = [result.text for result in pool.map(ResponseStream.result, requests)]
        assert texts[0] == alone.text
        assert len(set(texts)) == 8
        assert counts(up) == StateCounts(offered=9, released=9)
        eventually(up.idle, timeout_s=10)


@pytest.mark.timeout(180)
def test_no_request_fails_and_no_state_leaks_when_either_side_is_killed(tmp_path: Path) -> None:
    draw = random.Random(0)
    outputs = ("text", "computed")
    with deployed(split(tmp_path)) as up, up.client() as client, ThreadPoolExecutor(4) as pool:

        def generate(number: int) -> str:
            output = outputs[number % 2]
            return client.generate("hello", seed=number // 2, outputs=[output]).result().texts[output]

        alone = list(map(generate, range(4)))
        for victim in ("prefill-0", "decode-0", "computing-0", "prefill-0", "decode-0", "computing-0"):
            running = list(map(pool.submit, [generate] * 4, range(4)))
            # Kills at a random moment of the requests, each of which takes about half a second.
            time.sleep(draw.uniform(0, 0.6))
            up.kill(victim)
            assert [each.result(timeout=60) for each in running] == alone
            eventually(up.all_ready, timeout_s=30)
            eventually(lambda: all_released(up), timeout_s=20)
            found = counts(up)
            assert (found.cut_reads, found.refused_reads) == (0, 0)
        eventually(up.idle, timeout_s=20)


def test_cancelled_request_releases_its_state_at_once(tmp_path: Path) -> None:
    with local_mesh(split(tmp_path, state_s=5.0)) as up, up.client() as client, ThreadPoolExecutor(1) as pool:
        running = pool.submit(client.generate("hello", request_id="r1", outputs=["text"]).result)
        eventually(lambda: counts(up).offered == 1, timeout_s=10)
        client.cancel("r1")
        assert running.exception(timeout=10) is not None
        assert eventually(lambda: all_released(up), timeout_s=10) < 3
        eventually(up.idle, timeout_s=10)


def test_ticket_that_expires_in_the_queue_is_recomputed(tmp_path: Path) -> None:
    pipeline = split(tmp_path, limit_s=2.0, state_s=0.5)
    with local_mesh(pipeline) as up, up.client() as client, ThreadPoolExecutor(12) as pool:

        def generate(_: int) -> str:
            return client.generate("hello", seed=1, outputs=["computed"]).result().texts["computed"]

        alone = generate(0)
        assert set(pool.map(generate, range(12))) == {alone}
        found = counts(up)
        assert found.reads < found.offered
        assert found.cut_reads == 0
        eventually(lambda: all_released(up), timeout_s=5)
