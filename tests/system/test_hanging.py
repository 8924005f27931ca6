"""Replicas that say that they work and do not: their requests go on elsewhere, and nobody notices. Real processes."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import psutil
import pytest

from stagemesh.client import Admitted, Text
from stagemesh.client.results import ResultBuilder
from stagemesh.v1 import admin_pb2
from stagemesh.v1.admin_pb2_grpc import AdminServiceStub
from tests.deployment import Deployment, deployed

STEPS = 40
PIPELINE = f"""\
pipeline: hanging
stages:
  source: {{engine: fake, function: source, replicas: 2, options: {{steps: {STEPS}, step_s: 0.05}}}}
  relay:
    engine: fake
    function: relay
    replicas: 2
    stall_s: 1
    options: {{faults: [{{kind: hang, after_steps: 5}}]}}
edges: [{{from: source, to: relay}}]
outputs: {{text: source, echo: relay}}
"""


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    path = tmp_path_factory.mktemp("hanging") / "pipeline.yaml"
    path.write_text(PIPELINE)
    with deployed(path) as up:
        yield up


def test_a_process_that_is_stopped_loses_its_requests_and_no_client_notices(up: Deployment) -> None:
    with up.client() as client:
        undisturbed = client.generate("hello", seed=7, outputs=["text"]).result()
        builder, texts, stopped, stopped_s = ResultBuilder(), 0, None, 0.0
        for event in client.generate("hello", seed=7, outputs=["text"]):
            builder.add(event)
            if isinstance(event, Admitted):
                stopped = psutil.Process(up.process_id(event.replicas["source"]))
            texts += isinstance(event, Text)
            if texts == STEPS // 4 and isinstance(event, Text) and stopped is not None:
                stopped.suspend()
                stopped_s = time.monotonic()
        took_s = time.monotonic() - stopped_s
    assert stopped is not None
    assert stopped.status() == psutil.STATUS_STOPPED
    stopped.resume()
    assert builder.build().text == undisturbed.text
    # The rest takes a second and a half, the whole two; to be sure of a stopped process takes four at most.
    assert took_s < 9.0


def test_an_engine_that_hangs_is_given_up_and_no_client_notices(up: Deployment) -> None:
    with up.client() as client:
        builder, hung, process = ResultBuilder(), "", 0
        for event in client.generate("hello", seed=7):
            builder.add(event)
            if isinstance(event, Admitted):
                hung = event.replicas["relay"]
                process = up.process_id(hung)
    result = builder.build()
    assert result.texts["echo"] == result.texts["text"]
    up.wait(lambda up: up.statuses[hung]["state"] == "ready" and not up.runs(hung, process))


def test_requests_that_hang_alone_are_given_up_and_their_replica_is_not(tmp_path: Path) -> None:
    path = tmp_path / "pipeline.yaml"
    # The others have to be fed without a pause of `stall_s`, or else the engine hangs as a whole.
    alone = {
        "after_steps: 5": "after_steps: 5, probability: 0.2",
        "replicas: 2": "replicas: 1",
        "stall_s: 1": "stall_s: 3",
    }
    text = PIPELINE
    for former, latter in alone.items():
        text = text.replace(former, latter)
    path.write_text(text)
    with deployed(path) as up, up.client() as client, ThreadPoolExecutor(8) as pool:
        process = up.process_id("relay-0")
        requests = [client.generate("hello", seed=seed, request_id=f"r{seed}", max_tokens=200) for seed in range(8)]
        results = list(pool.map(lambda request: request.result(), requests))
        with grpc.insecure_channel(up.admin_endpoint) as channel:
            ask = AdminServiceStub(channel).GetRequest
            steps = [ask(admin_pb2.GetRequestRequest(request_id=f"r{seed}"), timeout=10).steps for seed in range(8)]
        assert up.process_id("relay-0") == process
    assert all(result.texts["echo"] == result.texts["text"] for result in results)
    reasons = [[step.error.reason for step in each if step.stage == "relay"] for each in steps]
    # Their seeds say which ones.
    assert [seed for seed in range(8) if reasons[seed] == ["STEP_HANGS", ""]] == [0, 2, 5]
    assert reasons.count([""]) == 5
