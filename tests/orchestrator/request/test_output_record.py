"""The record of a request's events, callers that read it slowly, and the timeline of a request."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import pytest

from stagemesh.common.errors import (
    CancelledRequestError,
    InternalError,
    InvalidRequestError,
    StagemeshError,
    UnavailableError,
)
from stagemesh.common.wire.telemetry import Playout
from stagemesh.orchestrator.request.output_record import RequestRecord
from stagemesh.orchestrator.request.timeline import History, RequestState, StepNotes, Timeline, Totals, describe_wait
from stagemesh.v1 import chunk_pb2, control_pb2, orchestrator_pb2, request_pb2, stage_pb2
from tests.orchestrator.mesh import CHAIN, ask, mesh
from tests.orchestrator.replicas import Clock
from tests.orchestrator.scripted_stage import ACCEPTED, Response, ScriptedStage, hang, text_output
from tests.rpc.call_errors import error_of, raises


def add_texts(record: RequestRecord, *texts: str, begin: int | None = None) -> None:
    """Adds parts of the output "text", from position `begin` on. None means that they continue the output."""
    position = record.position.counts.get(("text", 0), 0) if begin is None else begin
    for text in texts:
        record.add_output(request_pb2.Output(name="text", position=position, text=text))
        position += len(text.encode())


def _planned(*outputs: str) -> RequestRecord:
    """Returns the record of a request that runs and has these outputs."""
    record = RequestRecord(Timeline(outputs=outputs))
    record.timeline.note_planned()
    return record


def _record_of(*texts: str) -> RequestRecord:
    record = _planned("text")
    add_texts(record, *texts)
    record.close(None)
    return record


async def test_outputs_take_as_many_bytes_as_on_the_wire() -> None:
    record = _record_of("Hel", "lo")
    async with aclosing(record.journal.follow()) as items:
        assert sum([len(item) async for item in items]) == record.size_bytes


async def _received(record: RequestRecord, *, text: int = 0) -> list[orchestrator_pb2.GenerateResponse]:
    async with aclosing(record.follow(next_positions={("text", 0): text})) as events:
        return [orchestrator_pb2.GenerateResponse.FromString(event) async for event in events]


@pytest.mark.parametrize(("has", "lacks"), [(0, {0: "Hel", 3: "lo ", 6: "you"}), (4, {4: "o ", 6: "you"}), (9, {})])
async def test_callers_get_the_outputs_that_they_lack(has: int, lacks: dict[int, str]) -> None:
    *parts, last, finished = await _received(_record_of("Hel", "lo ", "you"), text=has)
    assert {event.output.position: event.output.text for event in parts if event.output.text} == lacks
    assert (last.output.position, last.output.WhichOneof("content")) == (9, None)
    assert last.output.finish.reason == request_pb2.FINISH_REASON_END
    assert finished.HasField("finished")


@pytest.mark.parametrize("position", [0, 4, 6])
async def test_the_events_so_far_are_those_that_a_caller_would_receive(position: int) -> None:
    record = _record_of("Hel", "lo ", "you")
    events = map(orchestrator_pb2.GenerateResponse.FromString, record.events_after({("text", 0): position}))
    assert list(events) == await _received(record, text=position)


async def test_a_restarted_stage_repeats_nothing() -> None:
    record = _planned("text")
    end = request_pb2.Output(name="text", position=5, finish=request_pb2.Finish(reason=request_pb2.FINISH_REASON_STOP))
    add_texts(record, "Hel", "lo")
    record.add_output(end)
    add_texts(record, "Hello", begin=0)
    record.add_output(end)
    record.close(None)
    received = await _received(record)
    assert [event.output.text for event in received if event.HasField("output")] == ["Hel", "lo", ""]


async def test_a_gap_in_an_output_is_a_defect() -> None:
    record = RequestRecord()
    add_texts(record, "He")
    with pytest.raises(InternalError, match="continues at 3, but only 2 were received"):
        add_texts(record, "o", begin=3)


async def test_a_stage_that_repeats_another_text_is_a_defect() -> None:
    record = _planned("text")
    add_texts(record, "ab")
    with raises(InternalError, reason="OUTPUT_OUT_OF_ORDER", match="another text, in which 2 is within"):
        add_texts(record, "a€", begin=0)
    add_texts(record, "c")
    record.close(None)
    assert [event.output.text for event in (await _received(record))[:2]] == ["ab", "c"]


async def test_a_caller_within_a_character_is_rejected_and_loses_nothing() -> None:
    record = _record_of("Zo", "ë🙂", "!")
    for position in (3, 5, 6, 7):
        with raises(InvalidRequestError, reason="INVALID_POSITION", match="use the end of the last part"):
            await _received(record, text=position)
        with raises(InvalidRequestError, reason="INVALID_POSITION"):
            record.events_after({("text", 0): position})
    assert [event.output.text for event in (await _received(record, text=4))[:2]] == ["🙂", "!"]


_ENDS = {
    "cancelled": (CancelledRequestError("stop"), request_pb2.FINISH_REASON_CANCELLED),
    "failed": (InternalError("broken"), request_pb2.FINISH_REASON_FAILED),
}


@pytest.mark.parametrize(("error", "reason"), _ENDS.values(), ids=_ENDS)
async def test_outputs_of_a_failed_request_end_with_its_usage(error: StagemeshError, reason: int) -> None:
    record = _planned("text", "audio")
    record.timeline.begin("writer", replica="writer-0", attempt=1).usage = request_pb2.Usage(output_tokens=3)
    add_texts(record, "Hel")
    record.close(error)
    received: list[orchestrator_pb2.GenerateResponse] = []
    with pytest.raises(type(error)):
        async for event in record.follow(next_positions={}):
            received.append(orchestrator_pb2.GenerateResponse.FromString(event))  # noqa: PERF401
    ends = {event.output.name: event.output for event in received if event.output.HasField("finish")}
    found = {name: (end.position, end.finish.reason) for name, end in ends.items()}
    assert found == {"text": (3, reason), "audio": (0, reason)}
    assert received[-1].finished.choices[0].stages["writer"].usage.output_tokens == 3


async def test_a_request_that_may_continue_elsewhere_does_not_end_its_outputs() -> None:
    record = _planned("text")
    add_texts(record, "Hel")
    record.close(UnavailableError("stops", reason="NOT_RUNNING"))
    with pytest.raises(UnavailableError):
        async for event in record.follow(next_positions={}):
            assert orchestrator_pb2.GenerateResponse.FromString(event).output.text == "Hel"


_LIMITED = CHAIN + "limits: {max_unread_bytes: 4194304}\n"
_PIECE = "x" * (256 << 10)


async def _talk(stage: ScriptedStage, request: stage_pb2.ExecuteStepRequest) -> AsyncIterator[Response]:
    """Sends output without end."""
    yield ACCEPTED
    while True:
        yield text_output(request.streamed[0].tensor, _PIECE)
        await asyncio.sleep(0)


async def test_a_client_that_does_not_read_stops_its_request_and_later_gets_the_error(tmp_path: Path) -> None:
    async with mesh(tmp_path, _LIMITED, scripts={"a": _talk, "b": hang, "c": hang}) as chain:
        call = chain.stub.Generate(ask())
        events = [await anext(aiter(call))]
        await chain.until_started()
        await chain.until_idle()
        error = await error_of(call, received=events)
    assert "4,194,304 bytes (limits.max_unread_bytes) behind" in error.message
    assert error.reason == "CLIENT_TOO_SLOW"
    outputs = [event.output for event in events if event.HasField("output") and event.output.name == "first"]
    assert [output.position for output in outputs] == [n * len(_PIECE) for n in range(len(outputs))]
    assert 4 << 20 < len(outputs) * len(_PIECE) < 32 << 20


@pytest.fixture
def stopped() -> list[str]:
    """The reasons for which `record` was stopped."""
    return []


@pytest.fixture
def record(stopped: list[str]) -> RequestRecord:
    """A record of which at most 1,000 bytes may be unread."""
    record = RequestRecord()
    record.stop_by(lambda error: stopped.append(error.reason), max_unread_bytes=1000)
    return record


async def test_a_client_that_keeps_up_may_read_any_amount(record: RequestRecord, stopped: list[str]) -> None:
    add_texts(record, "x")
    reading = record.follow(next_positions={})
    for _ in range(100):
        await anext(reading)
        add_texts(record, "x" * 300)
    assert stopped == []
    await reading.aclose()


async def test_the_fastest_of_several_callers_counts(record: RequestRecord, stopped: list[str]) -> None:
    add_texts(record, "x")
    fast, slow = record.follow(next_positions={}), record.follow(next_positions={})
    await anext(slow)
    for _ in range(10):
        await anext(fast)
        add_texts(record, "x" * 300)
    assert stopped == []
    add_texts(record, *["x" * 300] * 3)
    assert stopped[:1] == ["CLIENT_TOO_SLOW"]
    await fast.aclose()
    await slow.aclose()


async def test_late_callers_do_not_stop_a_large_request(record: RequestRecord, stopped: list[str]) -> None:
    add_texts(record, *["x" * 300] * 10)
    late = record.follow(next_positions={})
    await anext(late)
    add_texts(record, "x" * 300)
    assert stopped == []
    await late.aclose()


def _running(clock: Clock) -> tuple[Timeline, StepNotes]:
    timeline = Timeline("r", clock=clock)
    timeline.note_planned()
    notes = timeline.begin("a", replica="a-0", attempt=1)
    notes.note_sent()
    notes.note_accepted(stage_pb2.StepAccepted(queue_position=2))
    return timeline, notes


def test_times_count_from_when_the_request_was_received(clock: Clock) -> None:
    _, notes = _running(clock)
    clock.now_s = 3.0
    notes.note_output()
    clock.now_s = 5.0
    notes.note_output()
    assert (notes.accepted_s, notes.first_output_s, notes.last_event_s, notes.outputs) == (0.0, 3.0, 5.0, 2)


def test_progress_is_the_last_report() -> None:
    _, notes = _running(Clock())
    notes.note_progress(stage_pb2.StepProgress(engine_steps=1, total_engine_steps=9))
    notes.note_progress(stage_pb2.StepProgress(engine_steps=2, total_engine_steps=9))
    assert (notes.engine_steps, notes.total_engine_steps) == (2, 9)


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


def test_the_end_of_a_request_ends_its_attempts(clock: Clock) -> None:
    timeline, notes = _running(clock)
    clock.now_s = 7.0
    error = InternalError("broken")
    timeline.end(error)
    clock.now_s = 9.0
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
    usage = request_pb2.Usage(engine_steps=3, output_tokens=2)
    edge_usage = request_pb2.EdgeUsage(edge="a->b", connector=chunk_pb2.CONNECTOR_SHM, chunks=4, size_bytes=50)
    notes.note_finished(stage_pb2.StepFinished(usage=usage, edges=[edge_usage]))
    notes.end(None)
    done.end(None)
    totals.add(done)
    running, more = _running(Clock())
    more.note_output()
    both = totals.together_with([running])
    stage, edge = both.stages["a"], both.edges["a->b"]
    assert (stage.outputs, stage.finished, stage.failed, stage.engine_steps) == (2, 1, 0, 3)
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


_BLOCKED = _flow(wanted_bytes=2000, credit_bytes=10)
_WAITS = {
    "no credit": ({"outlets": [_BLOCKED]}, "credit from b-0 on edge a->b: it needs 2,000 bytes, and 10 remain"),
    "nothing to read": ({"inlets": [_flow(chunks=7)]}, "chunk 7 of edge a->b from b-0"),
    "all its inputs": ({"inlets": [_flow(chunks=7, waiting_chunks=1)], "outlets": [_flow()]}, ""),
    "finished": ({"outlets": [_flow(ended=True, waiting_chunks=3)]}, "b-0 to receive the last 3 chunks of edge a->b"),
}


@pytest.mark.parametrize(("flows", "wait"), _WAITS.values(), ids=_WAITS)
def test_a_step_that_has_started_waits_for_a_flow(flows: dict[str, list[control_pb2.FlowReport]], wait: str) -> None:
    report = control_pb2.StepReport(started=True, **flows)  # type: ignore[arg-type]
    assert describe_wait(_running(Clock())[1], report, unready=[]) == wait


def test_a_step_waits_for_its_consumers_and_then_for_its_replica() -> None:
    notes = Timeline("r").begin("a", replica="a-0", attempt=1)
    assert describe_wait(notes, None, unready=["b", "c"]) == "b and c to accept the request"
    notes.note_sent()
    assert describe_wait(notes, None, unready=[]) == "a-0 to accept the request"


_PLAYOUTS = {
    "one part": ([(1.0, 0.5)], 0.0, 0.0),
    "all in time": ([(1.0, 0.5), (1.2, 0.5), (1.9, 0.5)], 0.0, 0.0),
    "two late": ([(1.0, 0.5), (1.75, 0.5), (2.25, 0.5), (2.8, 0.5)], 0.3, 0.25),
    # After an underrun, the listener continues later.
    "in time after one late": ([(1.0, 0.5), (2.5, 0.5), (2.9, 0.5), (3.4, 0.5)], 1.0, 1.0),
}


@pytest.mark.parametrize(("parts", "total_s", "longest_s"), _PLAYOUTS.values(), ids=_PLAYOUTS)
def test_a_listener_waits_for_late_parts(parts: list[tuple[float, float]], total_s: float, longest_s: float) -> None:
    playout = Playout(parts[0][0])
    for at_s, duration_s in parts:
        playout.add(at_s, duration_s=duration_s)
    assert playout.underrun_s == pytest.approx(total_s)
    assert playout.longest_underrun_s == pytest.approx(longest_s)
