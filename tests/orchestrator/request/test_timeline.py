"""The timeline of a request, and the continuity of its audio."""

import pytest

from stagemesh.common.errors import CancelledRequestError, InternalError
from stagemesh.common.wire.telemetry import Playout
from stagemesh.orchestrator.request.timeline import (
    History,
    RequestState,
    StepNotes,
    Timeline,
    Totals,
    describe_wait,
)
from stagemesh.v1 import chunk_pb2, control_pb2, request_pb2, stage_pb2


class Clock:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def _running(clock: Clock) -> tuple[Timeline, StepNotes]:
    timeline = Timeline("r", clock=clock)
    timeline.note_planned()
    notes = timeline.begin("a", replica="a-0", attempt=1)
    notes.note_sent()
    notes.note_accepted(stage_pb2.StepAccepted(queue_position=2))
    return timeline, notes


def _finished(outputs: int = 2, steps: int = 3) -> stage_pb2.StepFinished:
    return stage_pb2.StepFinished(
        usage=request_pb2.Usage(steps=steps, output_tokens=outputs),
        edges=[request_pb2.EdgeUsage(edge="a->b", connector=chunk_pb2.CONNECTOR_SHM, chunks=4, size_bytes=50)],
    )


def test_times_count_from_when_the_request_was_received() -> None:
    clock = Clock()
    _, notes = _running(clock)
    clock.now_s = 103.0
    notes.note_output()
    clock.now_s = 105.0
    notes.note_output()
    assert (notes.accepted_s, notes.first_output_s, notes.last_event_s, notes.outputs) == (0.0, 3.0, 5.0, 2)


def test_progress_is_the_last_report() -> None:
    _, notes = _running(Clock())
    notes.note_progress(stage_pb2.StepProgress(steps=1, total_steps=9))
    notes.note_progress(stage_pb2.StepProgress(steps=2, total_steps=9))
    assert (notes.steps, notes.total_steps) == (2, 9)


def test_a_request_goes_from_queued_to_running_to_its_end() -> None:
    timeline = Timeline("r")
    states = [timeline.state]
    timeline.note_planned()
    states.append(timeline.state)
    timeline.end(None)
    assert [*states, timeline.state] == [RequestState.QUEUED, RequestState.RUNNING, RequestState.FINISHED]


def test_the_final_state_follows_from_the_error() -> None:
    ended = [_running(Clock())[0] for _ in range(2)]
    ended[0].end(InternalError("broken"))
    ended[1].end(CancelledRequestError("enough"))
    assert [timeline.state for timeline in ended] == [RequestState.FAILED, RequestState.CANCELLED]


def test_the_end_of_a_request_ends_its_attempts() -> None:
    clock = Clock()
    timeline, notes = _running(clock)
    clock.now_s = 107.0
    error = InternalError("broken")
    timeline.end(error)
    clock.now_s = 109.0
    assert (notes.ended_s, timeline.age_s, timeline.at_work) == (7.0, 7.0, [])
    assert [str(each) for each in (notes.error, timeline.error)] == ["broken", "broken"]


def test_a_stored_error_refers_to_no_frames() -> None:
    timeline, notes = _running(Clock())
    with pytest.raises(InternalError) as caught:
        raise InternalError("broken", reason="WHY") from KeyError("cause")
    notes.end(caught.value)
    timeline.end(caught.value)
    for error in (notes.error, timeline.error):
        assert error is not None
        assert (error.reason, error.__traceback__, error.__cause__, error.__context__) == ("WHY", None, None, None)


def test_totals_count_running_requests_as_they_are_and_ended_ones_once() -> None:
    totals = Totals()
    done, notes = _running(Clock())
    notes.note_output()
    notes.note_finished(_finished())
    notes.end(None)
    done.end(None)
    totals.add(done)
    running, more = _running(Clock())
    more.note_output()
    both = totals.together_with([running])
    stage, edge = both.stages["a"], both.edges["a->b"]
    assert (stage.outputs, stage.finished, stage.failed, stage.steps) == (2, 1, 0, 3)
    assert (edge.chunks, edge.size_bytes) == (4, 50)
    assert totals.stages["a"].outputs == 1


def test_only_the_newest_ended_requests_are_kept() -> None:
    history = History(keep=2)
    for name in ("one", "two", "one", "three"):
        history.add(Timeline(name))
    assert [timeline.request_id for timeline in history] == ["one", "three"]
    assert history.find("two") is None


def _flow(**fields: int | bool | str) -> control_pb2.FlowReport:
    return control_pb2.FlowReport(edge="a->b", peer="b-0", **{"connected": True, **fields})  # type: ignore[arg-type]


def test_a_step_that_was_not_sent_waits_for_its_consumers() -> None:
    notes = Timeline("r").begin("a", replica="a-0", attempt=1)
    assert describe_wait(notes, None, unready=["b", "c"]) == "b and c to accept the request"


def test_a_step_that_was_sent_waits_for_its_replica() -> None:
    notes = Timeline("r").begin("a", replica="a-0", attempt=1)
    notes.note_sent()
    assert describe_wait(notes, None, unready=[]) == "a-0 to accept the request"


def test_a_step_without_credit_waits_for_its_consumer() -> None:
    report = control_pb2.StepReport(started=True, outlets=[_flow(wanted_bytes=2000, credit_bytes=10)])
    said = describe_wait(_running(Clock())[1], report, unready=[])
    assert said == "credit from b-0 on edge a->b: it needs 2,000 bytes, and 10 remain"


def test_a_step_with_nothing_to_read_waits_for_its_producer() -> None:
    report = control_pb2.StepReport(started=True, inlets=[_flow(chunks=7)])
    assert describe_wait(_running(Clock())[1], report, unready=[]) == "chunk 7 of edge a->b from b-0"


def test_a_step_with_all_its_inputs_waits_for_nothing() -> None:
    report = control_pb2.StepReport(started=True, inlets=[_flow(chunks=7, waiting_chunks=1)], outlets=[_flow()])
    assert describe_wait(_running(Clock())[1], report, unready=[]) == ""


def test_a_finished_step_waits_for_its_last_chunks_to_arrive() -> None:
    report = control_pb2.StepReport(started=True, outlets=[_flow(ended=True, waiting_chunks=3)])
    assert describe_wait(_running(Clock())[1], report, unready=[]) == "b-0 to receive the last 3 chunks of edge a->b"


@pytest.mark.parametrize(
    ("parts", "total_s", "longest_s"),
    [
        ([(1.0, 0.5)], 0.0, 0.0),
        ([(1.0, 0.5), (1.2, 0.5), (1.9, 0.5)], 0.0, 0.0),
        ([(1.0, 0.5), (1.75, 0.5), (2.25, 0.5), (2.8, 0.5)], 0.3, 0.25),
        # After an underrun, the listener continues later.
        ([(1.0, 0.5), (2.5, 0.5), (2.9, 0.5), (3.4, 0.5)], 1.0, 1.0),
    ],
)
def test_a_listener_waits_for_parts_that_come_late(
    parts: list[tuple[float, float]], total_s: float, longest_s: float
) -> None:
    playout = Playout(parts[0][0])
    for at_s, duration_s in parts:
        playout.add(at_s, duration_s=duration_s)
    assert playout.underrun_s == pytest.approx(total_s)
    assert playout.longest_underrun_s == pytest.approx(longest_s)
