"""The trace context of a step, and its spans."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagemesh.common.wire.telemetry import MAX_SPANS, StepTrace, TraceParent
from stagemesh.v1 import stage_pb2

_SAMPLED = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.mark.parametrize(
    "text", [_SAMPLED, _SAMPLED.removesuffix("1") + "0", "00-" + "1" * 32 + "-" + "f" * 16 + "-00"]
)
def test_a_trace_context_is_read_and_written(text: str) -> None:
    parsed = TraceParent.parse(text)
    assert parsed is not None
    assert str(parsed) == text
    assert (StepTrace.of(text) is not None) == parsed.is_sampled


@pytest.mark.parametrize(
    "text",
    [
        "",
        "sampled",
        "00-" + "0" * 32 + "-" + "1" * 16 + "-01",
        "00-" + "1" * 32 + "-" + "0" * 16 + "-01",
        "ff" + _SAMPLED[2:],
        _SAMPLED.upper(),
        _SAMPLED + "0",
        _SAMPLED + "\n",
    ],
)
def test_a_malformed_trace_context_is_ignored(text: str) -> None:
    assert TraceParent.parse(text) is None
    assert StepTrace.of(text) is None


@given(st.text(max_size=80))
def test_any_text_is_read_without_an_error(text: str) -> None:
    assert TraceParent.parse(text) is None or str(TraceParent.parse(text)).startswith("00-")


def test_flags_of_later_versions_keep_their_meaning() -> None:
    parsed = TraceParent.parse("01" + _SAMPLED[2:-2] + "03")
    assert parsed is not None
    assert parsed.is_sampled


def test_spans_are_taken_once_and_limited() -> None:
    trace = StepTrace(_SAMPLED)
    now_s = time.monotonic()
    for seq in range(MAX_SPANS + 3):
        chunk = stage_pb2.ChunkSpan(edge="a->b", seq=seq, size_bytes=1, sent_s=now_s)
        trace.add_chunk(chunk, offered_s=now_s, acknowledged_s=now_s)
    assert len(trace) == MAX_SPANS + 3
    taken = trace.take()
    assert ([span.chunk.seq for span in taken.spans], taken.dropped) == (list(range(MAX_SPANS)), 3)
    assert not trace
    assert not trace.take().dropped
