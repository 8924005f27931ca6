"""Traces by OTLP: one trace for each request, from the client to the chunks between the stages."""

from collections import Counter
from collections.abc import Iterator

import pytest
from opentelemetry import trace
from opentelemetry.proto.trace.v1 import trace_pb2
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from stagemesh.client import Client, Finished, Text
from tests.deployment import Deployment, deployed
from tests.system.pipelines import relays
from tests.traces import TraceReceiver, explained_share, receiving_traces

_STEPS = 30
_CLIENT_SPANS = InMemorySpanExporter()


@pytest.fixture(scope="module")
def receiver() -> Iterator[tuple[TraceReceiver, str]]:
    with receiving_traces() as served:
        yield served


@pytest.fixture(scope="module")
def running(receiver: tuple[TraceReceiver, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(_CLIENT_SPANS))
    trace.set_tracer_provider(provider)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver[1])
        patch.setenv("OTEL_EXPORTER_OTLP_INSECURE", "true")
        patch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_off")
        pipeline = relays(tmp_path_factory.mktemp("traces"), steps=_STEPS, step_s=0.02)
        with deployed(pipeline) as running:
            yield running


@pytest.fixture
def client(running: Deployment) -> Iterator[Client]:
    _CLIENT_SPANS.clear()
    with running.client() as client:
        yield client


def _generate(client: Client, request_id: str) -> Finished:
    return client.generate("hello", request_id=request_id).result().finished


def _traced(receiver: TraceReceiver) -> tuple[ReadableSpan, list[tuple[str, trace_pb2.Span]]]:
    """Returns the client's span of the last request, and the spans that the orchestrator has exported for it."""
    (own,) = _CLIENT_SPANS.get_finished_spans()
    assert own.context is not None
    return own, receiver.trace(f"{own.context.trace_id:032x}")


def _check_whole(own: ReadableSpan, spans: list[tuple[str, trace_pb2.Span]]) -> None:
    """Checks that the spans are one tree below the client's span, and explain the client's time."""
    assert own.context is not None
    ids = Counter(span.span_id for _, span in spans)
    assert set(ids.values()) == {1}
    roots = [span for _, span in spans if span.parent_span_id == own.context.span_id.to_bytes(8)]
    assert [span.name for span in roots] == ["request"]
    orphans = [span.name for _, span in spans if span.parent_span_id not in ids and span is not roots[0]]
    assert not orphans
    assert own.start_time is not None
    assert own.end_time is not None
    share = explained_share([span for _, span in spans], begin_ns=own.start_time, end_ns=own.end_time)
    assert share >= 0.95, f"the critical path explains {share:.3f} of the time"


def _chunks(spans: list[tuple[str, trace_pb2.Span]]) -> Counter[str]:
    return Counter(span.name.removeprefix("chunk ") for _, span in spans if span.name.startswith("chunk "))


def _attribute(span: trace_pb2.Span, name: str) -> str | int:
    value = next(each.value for each in span.attributes if each.key == f"stagemesh.{name}")
    return value.string_value or value.int_value


def test_a_request_is_one_trace_with_each_chunk(client: Client, receiver: tuple[TraceReceiver, str]) -> None:
    finished = _generate(client, "traced")
    own, spans = _traced(receiver[0])
    _check_whole(own, spans)
    edges = {edge.edge: edge for stage in finished.stages.values() for edge in stage.edges}
    assert _chunks(spans) == {edge.edge: edge.chunks for edge in edges.values()}
    for name, edge in edges.items():
        hops = [span for _, span in spans if span.name == f"chunk {name}"]
        assert sum(int(_attribute(span, "bytes")) for span in hops) == edge.size_bytes
        assert {_attribute(span, "connector") for span in hops} == {edge.connector}
    assert {process for process, _ in spans} == {"orchestrator", "source-0", "relay-0", "frames-0"}


def test_a_killed_stage_is_a_part_of_the_trace(
    client: Client, receiver: tuple[TraceReceiver, str], running: Deployment
) -> None:
    events = iter(client.generate("hello", request_id="killed"))
    assert any(isinstance(event, Text) for event in events)
    running.kill("relay-0")
    assert list(events)
    own, spans = _traced(receiver[0])
    _check_whole(own, spans)
    names = [span.name for _, span in spans]
    assert {"relay", "recovery of relay", "relay, attempt 2"} <= set(names)
    (lost,) = [span for _, span in spans if span.name == "relay"]
    assert lost.status.code == trace_pb2.Status.STATUS_CODE_ERROR
    running.wait(Deployment.all_ready)


def test_requests_that_are_not_sampled_leave_no_spans(client: Client, receiver: tuple[TraceReceiver, str]) -> None:
    before = receiver[0].trace_ids
    unsampled = trace.NonRecordingSpan(trace.SpanContext(7, 7, is_remote=True, trace_flags=trace.TraceFlags(0)))
    with trace.use_span(unsampled):
        _generate(client, "not-sampled")
    _generate(client, "sampled")
    own, _ = _traced(receiver[0])
    assert own.context is not None
    assert receiver[0].trace_ids - before == {f"{own.context.trace_id:032x}"}
