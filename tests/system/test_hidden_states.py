"""Hidden states cross from a language model to the processes of other stages, over two kinds of edges."""

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from stagemesh.client import Client, Result, TensorOutput
from stagemesh.common.errors import CancelledRequestError
from tests.deployment import Deployment, deployed, eventually
from tests.engines.vllm.emitted_states import PROMPTS, STEPS, TOLERANCE, Floats, Reference, load_reference, reference
from tests.engines.vllm.tiny_model import write_real_model
from tests.module_fixtures import made_for_module
from tests.system.pipelines import pipeline_file
from tests.system.state_consumers import add_functions

pytestmark = pytest.mark.timeout(300)

PIPELINE = """\
pipeline: taking
stages:
  thinker:
    engine: vllm
    model: {model}
    options:
      dtype: float32
      kv_cache_memory_bytes: 8388608
      hidden_states: {{dtype: float32, share_bytes: 65536}}
  near: {{engine: function, function: taken}}
  far: {{engine: function, function: held, options: {{gate: {gate}}}}}
  last: {{engine: function, function: taken}}
edges:
  - {{from: thinker, to: near, connector: shm}}
  - {{from: thinker, to: far, connector: grpc}}
  - {{from: thinker, to: last, connector: shm, tokens: last}}
outputs:
  said: thinker.token_ids
  near: near.rows
  near_place: near.place
  far: far.rows
  far_place: far.place
  last: last.rows
  last_place: last.place
"""
ALL = ("said", "near", "near_place", "far", "far_place", "last", "last_place")


class Taking(NamedTuple):
    """A running pipeline, and the named pipe for which the stage `far` waits if a request asks for it."""

    up: Deployment
    gate: Path


model = made_for_module(write_real_model)


@pytest.fixture(scope="module")
def references(model: Path) -> list[Reference]:
    loaded = load_reference(model)
    return [reference(loaded, prompt) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def taking(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Taking]:
    folder = tmp_path_factory.mktemp("taking")
    gate = folder / "gate"
    os.mkfifo(gate)
    with pytest.MonkeyPatch.context() as patch:
        add_functions(folder, patch)
        with deployed(pipeline_file(folder, PIPELINE.format(model=model, gate=gate))) as up:
            yield Taking(up, gate)


def generate(client: Client, number: int, *, outputs: Sequence[str], hold: bool = False) -> Result:
    """Runs the prompt with this number, with greedy sampling."""
    return client.generate(
        token_ids=PROMPTS[number],
        seed=1,
        temperature=0.0,
        max_tokens=STEPS,
        ignore_eos=True,
        outputs=outputs,
        options={"hold": 1.0} if hold else {},
    ).result()


def rows_of(result: Result, output: str, *, first: int = 0) -> Floats:
    """Returns the rows that crossed an edge. Checks that each position from `first` on arrived once and in order."""
    places = [output.tensor.tolist() for output in result.tensors[f"{output}_place"]]
    rows = [np.asarray(one.tensor, np.float32) for one in result.tensors[output]]
    expected = first
    for (start, count), one in zip(places, rows, strict=True):
        assert (start, count) == (expected, len(one))
        expected += count
    return np.concatenate(rows)


def assert_taken(result: Result, expected: Reference, *outputs: str) -> None:
    """Checks the rows of each edge against those of transformers."""
    for output in outputs:
        rows = rows_of(result, output)
        assert rows.shape == expected.states["hidden_states"].shape
        assert np.abs(rows - expected.states["hidden_states"]).max() < TOLERANCE


def test_states_that_two_stages_take_equal_those_of_transformers(taking: Taking, references: list[Reference]) -> None:
    with taking.up.client() as client, ThreadPoolExecutor(16) as pool:
        results = list(pool.map(lambda number: generate(client, number, outputs=ALL), range(len(PROMPTS))))
        for result, expected, prompt in zip(results, references, PROMPTS, strict=True):
            assert list(result.tokens["said"]) == expected.tokens
            assert_taken(result, expected, "near", "far")
            last = rows_of(result, "last", first=len(prompt) - 1)
            assert np.array_equal(last, rows_of(result, "near")[len(prompt) - 1 :])
            connectors = {edge.edge: edge.connector for edge in result.finished.edges}
            assert connectors == {"thinker->near": "shm", "thinker->far": "grpc", "thinker->last": "shm"}
        eventually(taking.up.idle, timeout_s=10)


def test_no_states_are_sent_to_stages_that_a_request_does_not_use(taking: Taking) -> None:
    with taking.up.client() as client:
        assert generate(client, 3, outputs=["said"]).finished.edges == ()


def test_a_slow_consumer_delays_only_its_own_request(taking: Taking, references: list[Reference]) -> None:
    with taking.up.client() as client, ThreadPoolExecutor(16) as pool:
        slow = pool.submit(generate, client, 15, outputs=["far", "far_place"], hold=True)
        eventually(lambda: taking.up.load("thinker-0").arena_used_bytes > 0, timeout_s=10)
        others = [pool.submit(generate, client, number, outputs=["near", "near_place"]) for number in range(15)]
        try:
            for number, other in enumerate(others):
                assert_taken(other.result(timeout=30), references[number], "near")
            assert not slow.done()
        finally:
            eventually(lambda: _opened(taking.gate) and slow.done(), timeout_s=30)
        assert_taken(slow.result(), references[15], "far")
        eventually(taking.up.idle, timeout_s=10)


def _opened(gate: Path) -> bool:
    """Releases a stage that waits at the gate. Between two packets no stage waits there."""
    with suppress(OSError):
        os.close(os.open(gate, os.O_WRONLY | os.O_NONBLOCK))
    return True


def test_cancelled_request_frees_its_rows(taking: Taking) -> None:
    with taking.up.client() as client, ThreadPoolExecutor(2) as pool:
        # The last stage waits, so that the request cannot finish before it is cancelled.
        request = client.generate(
            token_ids=PROMPTS[9],
            max_tokens=120,
            ignore_eos=True,
            outputs=["near", "far"],
            options={"hold": 1.0},
            request_id="cancelled",
        )
        events = iter(request)
        assert len(next(event for event in events if isinstance(event, TensorOutput)).tensor)
        rest, cancelling = pool.submit(list, events), pool.submit(client.cancel, "cancelled")
        try:
            assert isinstance(rest.exception(timeout=30), CancelledRequestError)
        finally:
            eventually(lambda: _opened(taking.gate) and cancelling.done() and taking.up.idle(), timeout_s=30)
        assert cancelling.exception() is None
