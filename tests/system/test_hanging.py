"""Replicas that say that they work and do not: their requests go on elsewhere, and nobody notices. Real processes."""

import time
from collections.abc import Iterator

import psutil
import pytest

from stagemesh.client import Admitted, Text
from stagemesh.client.results import ResultBuilder
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
