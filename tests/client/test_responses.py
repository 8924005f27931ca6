"""Builds results from events."""

import gc
import weakref

import pytest

from stagemesh.client.responses import Admitted, Finished, Image, Progress, ResultBuilder, Text, Timings
from stagemesh.common.errors import InternalError

_ADMITTED = Admitted("r", 7, {"a": "a-0"})
_FINISHED = Finished({}, Timings(0.0, 0.1, 0.2))


def test_a_result_contains_the_newest_image_and_the_builder_retains_no_earlier_one() -> None:
    builder, first = ResultBuilder(), Image("picture", b"first", "image/png")
    earlier = weakref.ref(first)
    builder.add(_ADMITTED)
    builder.add(first)
    del first
    builder.add(Image("picture", b"second", "image/png"))
    gc.collect()
    assert earlier() is None
    builder.add(_FINISHED)
    assert {output: image.data for output, image in builder.build().images.items()} == {"picture": b"second"}


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


def test_a_result_without_the_last_event_is_an_error() -> None:
    builder = ResultBuilder()
    builder.add(_ADMITTED)
    with pytest.raises(InternalError, match="finished"):
        builder.build()
