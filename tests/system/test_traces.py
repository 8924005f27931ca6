"""Traces by OTLP: one trace for each request, from the client to the chunks between the stages."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from opentelemetry import trace
from opentelemetry.proto.trace.v1 import trace_pb2

from stagemesh.client import Client, Finished, Text
from tests.deployment import Deployment, deployed
from tests.local_mesh import local_mesh
from tests.system.pipelines import pipeline_file, relays
from tests.traces import TraceReceiver, check_whole, chunks_of, last_trace, receiving_traces

HEARD = """
pipeline: heard
stages: {speak: {engine: fake, function: relay}}
edges: [{from: "@input", to: speak}]
outputs: {audio: speak}
"""


@pytest.fixture(scope="module")
def receiver() -> Iterator[TraceReceiver]:
    with receiving_traces() as receiver:
        yield receiver


@pytest.fixture(scope="module")
def running(receiver: TraceReceiver, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    # A request takes 1.8 s, so that the delays of a busy machine, tens of milliseconds, are a small share of it.
    with deployed(relays(tmp_path_factory.mktemp("traces"), steps=30, step_s=0.06)) as running:
        yield running


@pytest.fixture
def client(running: Deployment) -> Iterator[Client]:
    with running.client() as client:
        yield client


def _generate(client: Client, request_id: str) -> Finished:
    return client.generate("hello", request_id=request_id).result().finished


def _attribute(span: trace_pb2.Span, name: str) -> str | int:
    value = next(each.value for each in span.attributes if each.key == f"stagemesh.{name}")
    return value.string_value or value.int_value


def test_a_request_is_one_trace_with_each_chunk(client: Client, receiver: TraceReceiver) -> None:
    finished = _generate(client, "traced")
    own, spans = last_trace(receiver)
    check_whole(own, spans)
    edges = {edge.edge: edge for stage in finished.stages.values() for edge in stage.edges}
    assert chunks_of(spans) == {edge.edge: edge.chunks for edge in edges.values()}
    for name, edge in edges.items():
        hops = [span for _, span in spans if span.name == f"chunk {name}"]
        assert sum(int(_attribute(span, "bytes")) for span in hops) == edge.size_bytes
        assert {_attribute(span, "connector") for span in hops} == {edge.connector}
    assert {process for process, _ in spans} == {"orchestrator", "source-0", "relay-0", "frames-0"}


def test_a_killed_stage_is_a_part_of_the_trace(client: Client, receiver: TraceReceiver, running: Deployment) -> None:
    events = iter(client.generate("hello", request_id="killed"))
    assert any(isinstance(event, Text) for event in events)
    running.kill("relay-0")
    assert list(events)
    own, spans = last_trace(receiver)
    check_whole(own, spans)
    assert {"relay", "recovery of relay", "relay, attempt 2"} <= {span.name for _, span in spans}
    (lost,) = [span for _, span in spans if span.name == "relay"]
    assert lost.status.code == trace_pb2.Status.STATUS_CODE_ERROR
    running.wait(Deployment.all_ready)


def test_streamed_input_is_a_part_of_the_trace(receiver: TraceReceiver, tmp_path: Path) -> None:
    with local_mesh(pipeline_file(tmp_path, HEARD)) as running, running.client() as client:
        with client.converse(input_mode="stream") as session:
            session.append("one ", "two")
            session.commit()
            assert list(session.answer())
        _, spans = last_trace(receiver)
    assert all(span.start_time_unix_nano <= span.end_time_unix_nano for _, span in spans)
    hops = [(process, span) for process, span in spans if span.name == "chunk @input->speak"]
    assert {process for process, _ in hops} == {"orchestrator"}
    assert sum(int(_attribute(span, "bytes")) for _, span in hops) == len("one two")


def test_requests_that_are_not_sampled_leave_no_spans(client: Client, receiver: TraceReceiver) -> None:
    before = receiver.trace_ids
    unsampled = trace.NonRecordingSpan(trace.SpanContext(7, 7, is_remote=True, trace_flags=trace.TraceFlags(0)))
    with trace.use_span(unsampled):
        _generate(client, "not-sampled")
    _generate(client, "sampled")
    own, _ = last_trace(receiver)
    assert own.context is not None
    assert receiver.trace_ids - before == {f"{own.context.trace_id:032x}"}
