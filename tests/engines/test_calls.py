"""The measured calls of an engine."""

from stagemesh.common.wire.telemetry import StepTrace
from stagemesh.services.engines.calls import EngineCalls

_TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-{:016x}-01"


def test_requests_of_one_call_refer_to_each_other() -> None:
    traces = [StepTrace(_TRACEPARENT.format(number)) for number in range(1, 41)]
    EngineCalls().add([None, *traces], seconds=0.5)
    for trace in traces:
        (span,) = trace.take().spans
        others = [other.traceparent for other in traces if other is not trace]
        assert (span.call.requests, list(span.call.links)) == (41, others[:32])
        assert span.start_s == 0.0
        assert span.end_s > 0.0


def test_calls_are_counted_by_seconds_and_requests() -> None:
    calls = EngineCalls()
    calls.add([None], seconds=0.004)
    calls.add([None, None, None], seconds=0.25)
    metrics = {metric.name: metric for metric in calls.metrics()}
    values = {(each.name, each.labels.get("le")): each.value for metric in metrics.values() for each in metric.samples}
    assert values["stagemesh_engine_call_seconds_count", None] == 2
    assert values["stagemesh_engine_call_seconds_sum", None] == 0.254
    assert values["stagemesh_engine_call_seconds_bucket", "0.005"] == 1
    assert values["stagemesh_engine_call_seconds_bucket", "0.25"] == 2
    assert values["stagemesh_engine_call_requests_bucket", "1"] == 1
    assert values["stagemesh_engine_call_requests_bucket", "4"] == 2
    assert values["stagemesh_engine_call_requests_sum", None] == 4
