"""Replicas that hang, as real processes. Their requests continue elsewhere, and no client notices."""

import time
from concurrent.futures import ThreadPoolExecutor

import psutil

from stagemesh.client import Admitted, Text
from stagemesh.client.responses import ResultBuilder
from tests.deployment import Deployment, deployed_for_module
from tests.system.pipelines import pipeline_file
from tests.system.reading import steps_of

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
  # The other requests must get input without a pause of `stall_s`. Otherwise the whole engine counts as hanging.
  alone:
    engine: fake
    function: relay
    stall_s: 3
    options: {{faults: [{{kind: hang, after_steps: 5, probability: 0.2}}]}}
edges: [{{from: source, to: relay}}, {{from: source, to: alone}}]
outputs: {{text: source, echo: relay, alone: alone}}
"""


up = deployed_for_module(lambda folder: pipeline_file(folder, PIPELINE))


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
    # The rest takes 1.5 s of the whole 2 s. A stopped process is detected within 4 s.
    assert took_s < 9.0


def test_a_hanging_engine_is_replaced_and_no_client_notices(up: Deployment) -> None:
    with up.client() as client:
        builder, hung, process = ResultBuilder(), "", 0
        for event in client.generate("hello", seed=7, outputs=["text", "echo"]):
            builder.add(event)
            if isinstance(event, Admitted):
                hung = event.replicas["relay"]
                process = up.process_id(hung)
    result = builder.build()
    assert result.texts["echo"] == result.texts["text"]
    up.wait(lambda up: up.statuses[hung]["state"] == "ready" and not up.runs(hung, process))


def test_requests_that_hang_alone_restart_and_their_replica_does_not(up: Deployment) -> None:
    up.wait(Deployment.all_ready)
    process = up.process_id("alone-0")
    with up.client() as client, ThreadPoolExecutor(8) as pool:
        requests = [
            client.generate("hello", seed=seed, request_id=f"r{seed}", max_tokens=200, outputs=["text", "alone"])
            for seed in range(8)
        ]
        results = list(pool.map(lambda request: request.result(), requests))
    assert up.process_id("alone-0") == process
    assert all(result.texts["alone"] == result.texts["text"] for result in results)
    steps = [[step for step in steps_of(up, f"r{seed}") if step.stage == "alone"] for seed in range(8)]
    reasons = [[step.error.reason for step in each] for each in steps]
    # The seed decides which requests hang.
    assert [seed for seed in range(8) if reasons[seed] == ["STEP_HANGS", ""]] == [3, 4, 6]
    assert reasons.count([""]) == 5
