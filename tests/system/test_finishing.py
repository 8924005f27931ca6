"""Why outputs end, and the work of requests that end early, as a client sees them."""

from collections.abc import Iterator

import pytest

from stagemesh.client import Client, Event, Finished, OutputFinished, Text
from stagemesh.common.errors import CancelledRequestError, InternalError
from tests.deployment import Deployment, deployed

WRITER = """
pipeline: writer
stages:
  writer: {engine: fake, function: source, options: {steps: 6}}
  slow: {engine: fake, function: relay, options: {step_s: 0.1}, when: {output: slow}}
  broken: {engine: fake, function: relay, options: {fail_at_step: 2}, when: {output: broken}}
edges: [{from: writer, to: slow}, {from: writer, to: broken}]
outputs: {text: writer, slow: slow, broken: broken}
"""


@pytest.fixture(scope="module")
def writer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    path = tmp_path_factory.mktemp("writer") / "writer.yaml"
    path.write_text(WRITER)
    with deployed(path) as up:
        yield up


@pytest.fixture
def client(writer: Deployment) -> Iterator[Client]:
    with writer.client() as client:
        yield client


def _ends(events: list[Event]) -> dict[str, str]:
    return {event.output: event.reason for event in events if isinstance(event, OutputFinished)}


def test_an_output_says_why_it_ends(client: Client) -> None:
    finishes = [
        client.generate("hi", outputs=["text"], **arguments).result().finishes["text"]
        for arguments in ({}, {"max_tokens": 2}, {"stop": ["never", "Step 2"]})
    ]
    assert finishes == [
        OutputFinished("text", "end"),
        OutputFinished("text", "length"),
        OutputFinished("text", "stop", stop_text="Step 2"),
    ]


def test_a_failed_request_reports_its_work(client: Client) -> None:
    events: list[Event] = []
    with pytest.raises(InternalError, match="fails at step 2"):
        events.extend(client.generate("hi", outputs=["text", "broken"]))
    assert _ends(events)["broken"] == "failed"
    finished = events[-1]
    assert isinstance(finished, Finished)
    assert finished.stages["broken"].usage.steps == 2


def test_a_cancelled_request_reports_its_work(client: Client, writer: Deployment) -> None:
    events: list[Event] = []
    with pytest.raises(CancelledRequestError):
        for event in client.generate("hi", outputs=["text", "slow"], request_id="mine"):
            events.append(event)
            if isinstance(event, Text) and event.output == "slow":
                client.cancel("mine")
    assert _ends(events) == {"text": "end", "slow": "cancelled"}
    finished = events[-1]
    assert isinstance(finished, Finished)
    assert (finished.stages["writer"].usage.steps, finished.stages["slow"].usage.prompt_tokens) == (6, 0)
    assert 1 <= finished.stages["slow"].usage.steps < 6
