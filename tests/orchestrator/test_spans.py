"""The spans of a request."""

from itertools import pairwise
from typing import Any

import pytest

from stagemesh.common.wire.telemetry import TraceParent
from stagemesh.orchestrator.request.timeline import Timeline
from stagemesh.orchestrator.spans import ORCHESTRATOR, Span, TraceContext, request_spans, step_path
from stagemesh.v1 import admin_pb2, chunk_pb2, request_pb2, stage_pb2


def _step(**fields: Any) -> admin_pb2.StepStatus:
    times: dict[str, Any] = {"planned_s": 1.0, "sent_s": 1.1, "accepted_s": 1.2, "first_output_s": 2.0, "ended_s": 4.0}
    return admin_pb2.StepStatus(**{"stage": "a", "replica": "a-0", "attempt": 1, **times, **fields})


def _spans(*steps: admin_pb2.StepStatus) -> list[Span]:
    request = admin_pb2.RequestStatus(request_id="r", state=admin_pb2.REQUEST_STATE_FINISHED, age_s=5.0, outputs=["o"])
    return request_spans(admin_pb2.GetRequestResponse(request=request, planned_s=1.0, steps=steps))


def _made(*spans: stage_pb2.StepSpan, dropped: int = 0) -> stage_pb2.StepSpans:
    return stage_pb2.StepSpans(spans=spans, dropped=dropped)


def _short(spans: list[Span]) -> list[tuple[str, float, float]]:
    return [(span.name, span.start_s, span.end_s) for span in spans]


def test_the_parts_of_an_attempt_follow_each_other() -> None:
    timings = request_pb2.Timings(started_s=0.3)
    spans = _spans(_step(finished=stage_pb2.StepFinished(timings=timings)))
    assert _short(spans) == [
        ("request", 0.0, 5.0),
        ("queue", 0.0, 1.0),
        ("a", 1.0, 4.0),
        ("wait for consumers", 1.0, 1.1),
        ("send", 1.1, 1.2),
        ("wait for input", 1.2, 1.5),
        ("first output", 1.5, 2.0),
        ("further outputs", 2.0, 4.0),
    ]
    assert all(before.end_s == after.start_s for before, after in pairwise(spans[3:]))
    assert [span.process for span in spans[:3]] == [ORCHESTRATOR, ORCHESTRATOR, "a-0"]


def test_the_first_output_to_another_stage_is_known_from_the_replica() -> None:
    timings = request_pb2.Timings(started_s=0.3, first_output_s=0.7)
    step = admin_pb2.StepStatus(stage="a", planned_s=1.0, sent_s=1.1, accepted_s=1.2, ended_s=4.0)
    step.finished.timings.CopyFrom(timings)
    assert _short(_spans(step))[-2:] == [("first output", 1.5, 1.9), ("further outputs", 1.9, 4.0)]


def test_each_span_has_a_parent() -> None:
    spans = _spans(_step(), _step(index=1), _step(stage="b"))
    paths = [span.path for span in spans]
    assert len(set(paths)) == len(paths)
    assert all(path[:-1] in paths[:number] for number, path in enumerate(paths) if number)


def test_a_request_that_waits_has_no_other_spans() -> None:
    request = admin_pb2.RequestStatus(request_id="r", state=admin_pb2.REQUEST_STATE_QUEUED, age_s=2.0)
    assert _short(request_spans(admin_pb2.GetRequestResponse(request=request))) == [
        ("request", 0.0, 2.0),
        ("queue", 0.0, 2.0),
    ]


def test_an_attempt_that_runs_ends_with_the_present() -> None:
    step = admin_pb2.StepStatus(stage="a", replica="a-0", attempt=1, planned_s=1.0, sent_s=1.5)
    assert _short(_spans(step))[2:] == [("a", 1.0, 5.0), ("wait for consumers", 1.0, 1.5), ("send", 1.5, 5.0)]


def test_recoveries_are_attempts_with_their_cause() -> None:
    lost = _step(ended_s=2.5, error=chunk_pb2.Error(reason="REPLICA_LOST", message="a-0 was lost"))
    again = _step(replica="a-1", attempt=2, planned_s=2.6, resumed_engine_steps=7)
    spans = [span for span in _spans(lost, again) if len(span.path) == 2]
    first, second = [span for span in spans if span.process != ORCHESTRATOR]
    assert (first.error, first.attributes["error.reason"]) == ("a-0 was lost", "REPLICA_LOST")
    assert (second.name, second.error, second.attributes["resumed_steps"]) == ("a, attempt 2", "", 7)
    assert _short(spans)[2:3] == [("recovery of a", 2.5, 2.6)]


def test_chunks_and_calls_are_within_their_attempt() -> None:
    chunk = stage_pb2.ChunkSpan(edge="a->b", seq=3, size_bytes=40, connector=chunk_pb2.CONNECTOR_SHM, sent_s=0.7)
    call = stage_pb2.CallSpan(requests=2, links=["00-" + "1" * 32 + "-" + "2" * 16 + "-01"])
    made = _made(
        stage_pb2.StepSpan(start_s=0.5, end_s=0.9, chunk=chunk),
        stage_pb2.StepSpan(start_s=1.0, end_s=9.0, call=call),
        stage_pb2.StepSpan(start_s=1.0, end_s=2.0),
        dropped=5,
    )
    spans = _spans(_step(spans=made))
    sent, called = [span for span in spans if span.is_repeated]
    assert sent.name == "chunk a->b"
    assert (sent.start_s, sent.end_s) == pytest.approx((1.7, 2.1))
    attributes = {"edge": "a->b", "seq": 3, "bytes": 40, "connector": "shm", "wait_s": pytest.approx(0.2)}
    assert sent.attributes == attributes
    assert (called.name, called.end_s, called.attributes["requests"]) == ("call", 4.0, 2)
    assert called.links == tuple(call.links)
    assert spans[2].attributes["dropped_spans"] == 5


def test_any_numbers_of_an_external_stage_make_spans_within_the_attempt() -> None:
    huge, nan = (1 << 64) - 1, float("nan")
    numbers = [nan, -5.0, float("inf"), 1e300]
    made = [
        stage_pb2.StepSpan(
            start_s=start,
            end_s=end,
            chunk=stage_pb2.ChunkSpan(seq=huge, size_bytes=huge, connector=99, sent_s=start),  # type: ignore[arg-type]
        )
        for start in numbers
        for end in numbers
    ]
    attempt, *spans = [span for span in _spans(_step(spans=_made(*made))) if span.is_repeated or span.name == "a"]
    assert len(spans) == len(made)
    for span in spans:
        assert attempt.start_s <= span.start_s <= span.end_s <= attempt.end_s
        assert span.attributes["seq"] == (1 << 63) - 1
        assert 0 <= float(span.attributes["wait_s"]) <= attempt.end_s


def test_spans_of_an_external_stage_are_bounded() -> None:
    notes = Timeline("r").begin("a", replica="a-0", attempt=1)
    large = _made(stage_pb2.StepSpan(chunk=stage_pb2.ChunkSpan(edge="e" * 5_000_000)), dropped=(1 << 64) - 1)
    for _ in range(3):
        notes.note_spans(large)
    assert notes.spans is not None
    assert len(notes.spans.spans) == 1
    assert notes.spans.dropped == 3 * (1 << 32) + 2


def test_the_ids_of_spans_depend_on_their_paths_and_the_request() -> None:
    one, other = TraceContext.make(None), TraceContext.make(None)
    paths = [span.path for span in _spans(_step(), _step(index=1), _step(stage="b"))]
    ids = {str(trace.traceparent(path)) for trace in (one, other) for path in paths}
    assert len(ids) == 2 * len(paths)
    assert all((parsed := TraceParent.parse(each)) is not None and str(parsed) == each for each in ids)
    path = step_path("r", "a", index=0, attempt=1)
    assert path in paths
    parent = TraceParent("1" * 32, "2" * 16, is_sampled=True)
    assert TraceContext.make(parent).traceparent(path).trace_id == parent.trace_id


def test_rebindings_and_work_are_shown() -> None:
    finished = stage_pb2.StepFinished(
        usage=request_pb2.Usage(output_tokens=12), edges=[request_pb2.EdgeUsage(edge="a->b", chunks=3, size_bytes=40)]
    )
    step = _step(finished=finished, rebindings=[admin_pb2.StepRebinding(at_s=3.0, edges=["a->b"])])
    spans = _spans(step)
    assert _short(spans)[-1] == ("connected again: a->b", 3.0, 3.0)
    assert spans[2].attributes["output_tokens"] == 12
    assert (spans[2].attributes["a->b.chunks"], spans[2].attributes["a->b.bytes"]) == (3, 40)
