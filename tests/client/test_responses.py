"""Builds results from events."""

import gc
import weakref

import pytest

from stagemesh.client.received_events import EventDecoder
from stagemesh.client.responses import (
    Admitted,
    Finished,
    Image,
    OutputFinished,
    Progress,
    ResultBuilder,
    StageReport,
    Text,
    Timings,
    Usage,
)
from stagemesh.common.errors import InternalError
from stagemesh.v1 import orchestrator_pb2, request_pb2

_ADMITTED = Admitted("r", 7, ({"a": "a-0"},))
_FINISHED = Finished(({},), Timings(0.0, 0.1, 0.2))


def test_a_result_contains_all_images_but_no_previews() -> None:
    builder, preview = ResultBuilder(), Image("picture", b"preview", "image/png", preview=True)
    shown = weakref.ref(preview)
    builder.add(_ADMITTED)
    builder.add(preview)
    del preview
    for data in (b"first", b"second"):
        builder.add(Image("picture", data, "image/png"))
    gc.collect()
    assert shown() is None
    builder.add(OutputFinished("picture", "end"))
    builder.add(_FINISHED)
    result = builder.build()
    assert [image.data for image in result.images["picture"]] == [b"first", b"second"]
    assert result.finishes == {"picture": OutputFinished("picture", "end")}


def test_a_builder_retains_no_progress() -> None:
    builder, progress = ResultBuilder(), Progress("a", 1, None)
    reported = weakref.ref(progress)
    builder.add(_ADMITTED)
    builder.add(progress)
    del progress
    gc.collect()
    assert reported() is None


def test_the_deltas_of_a_text_are_joined_in_order() -> None:
    builder = ResultBuilder()
    for event in (_ADMITTED, Text("t", "one "), Text("other", "x"), Text("t", "two"), _FINISHED):
        builder.add(event)
    assert builder.build().texts == {"t": "one two", "other": "x"}


def test_a_result_has_the_outputs_of_each_choice() -> None:
    reports = [StageReport(Usage(steps, steps, steps), Timings(0.0, None, 0.1), ()) for steps in (2, 3)]
    builder = ResultBuilder()
    builder.add(Admitted("r", 2**63 - 1, ({"a": "a-0"}, {"a": "a-1"})))
    for event in (Text("t", "one"), Text("t", "two", index=1), OutputFinished("t", "stop", index=1)):
        builder.add(event)
    builder.add(Finished(tuple({"a": report} for report in reports), Timings(0.0, 0.1, 0.2)))
    result = builder.build()
    assert [(choice.seed, choice.text) for choice in result.choices] == [(2**63 - 1, "one"), (0, "two")]
    assert ([list(choice.finishes) for choice in result.choices], result.text) == ([[], ["t"]], "one")
    assert (result.finished.stages["a"], result.finished.usage) == (reports[0], {"a": Usage(5, 5, 5)})


def test_a_result_without_the_last_event_is_an_error() -> None:
    builder = ResultBuilder()
    builder.add(_ADMITTED)
    with pytest.raises(InternalError, match="finished"):
        builder.build()


def test_an_unknown_finish_reason_is_unspecified() -> None:
    output = request_pb2.Output(name="text")
    output.finish.MergeFromString(b"\x08\x63")
    (event,) = EventDecoder().decode(orchestrator_pb2.GenerateResponse(output=output))
    assert event == OutputFinished("text", "unspecified")
