"""RebindStep: edges of a running step move to other replicas."""

from collections.abc import Callable
from typing import Any

from stagemesh.common.errors import Code
from stagemesh.stage_conformance.cases import RECOVERY, Needs, answer_of, case, expect, expect_equal, expect_failure
from stagemesh.stage_conformance.played_consumer import Consumer
from stagemesh.stage_conformance.suites.consumer import complete, more, started
from stagemesh.stage_conformance.suites.steps import resume, running
from stagemesh.stage_conformance.trial import Step, Trial, require
from stagemesh.v1 import stage_pb2

_RULE = "Rebinding and attempts"


def _request(step: Step, **fields: Any) -> stage_pb2.RebindStepRequest:
    named = step.request
    return stage_pb2.RebindStepRequest(request_id=named.request_id, step_id=named.step_id, **fields)


def _input(trial: Trial, attempt: int, **first_rows: int) -> stage_pb2.InputRebinding:
    binding = stage_pb2.InputBinding(edge=trial.edge_in, producer=trial.peer_name("producer"), attempt=attempt)
    return stage_pb2.InputRebinding(binding=binding, first_rows=first_rows)


async def _rebind(trial: Trial, request: stage_pb2.RebindStepRequest) -> None:
    await answer_of(trial.stub.RebindStep(request, timeout=5))


async def _refused(trial: Trial, request: stage_pb2.RebindStepRequest, code: Code, *reasons: str) -> Any:
    return await expect_failure(trial.stub.RebindStep(request, timeout=5), code, *reasons)


async def _expect_attempt(trial: Trial, edge: str, attempt: int) -> None:
    """Expects that a call which attaches learns of the attempt in which the flow of an edge is bound."""
    again = await trial.call(trial.repeated(attach_only=True)).accepted()
    expect_equal("StepAccepted.flow_attempts", attempt, again.events[0].accepted.flow_attempts.get(edge))


@case("steps.rebind-unknown-step", f"{_RULE}: UNKNOWN_STEP", level=RECOVERY)
async def unknown_step(trial: Trial) -> None:
    request = stage_pb2.RebindStepRequest(request_id=trial.request_id, step_id="none")
    await _refused(trial, request, Code.NOT_FOUND, "UNKNOWN_STEP")


@case("producer.rebind-unknown-edge", f"{_RULE}: UNKNOWN_EDGE", Needs.OUTPUT, level=RECOVERY)
async def unknown_edge(trial: Trial) -> None:
    step, peer, flow = await running(trial)
    assert peer is not None
    # The other binding of the call may not take effect, either.
    request = _request(step, inputs=[_input(trial, 2)] if flow is not None else [])
    trial.bind(request.outputs.add(), peer, attempt=2)
    request.outputs[0].edge = "conformance.none"
    await _refused(trial, request, Code.NOT_FOUND, "UNKNOWN_EDGE")
    await resume(peer, flow)
    await step.finished()


@case("steps.rebind-same", f"{_RULE}: a call with a binding that is in force has no effect", level=RECOVERY)
async def same(trial: Trial) -> None:
    step, peer, flow = await running(trial)
    request = _request(step, outputs=step.request.outputs)
    if flow is not None:
        request.inputs.append(_input(trial, 1))
    await _rebind(trial, request)
    await resume(peer, flow)
    await step.finished()


_REFUSED: dict[str, tuple[dict[str, Any], Code, tuple[str, ...]]] = {
    "lower-attempt": ({"attempt": 2}, Code.FAILED_PRECONDITION, ("STALE_ATTEMPT",)),
    "attempt-0": ({"attempt": 0}, Code.INVALID_ARGUMENT, ()),
    "transform": ({"attempt": 4, "transform": "conformance.none"}, Code.INVALID_ARGUMENT, ("INVALID_EDGE",)),
    "apart": ({"attempt": 4, "apart": True}, Code.INVALID_ARGUMENT, ("INVALID_EDGE",)),
    "edge": ({"attempt": 4, "edge": "conformance.none"}, Code.NOT_FOUND, ("UNKNOWN_EDGE",)),
}


@case(
    "consumer.rebind-refused",
    f"{_RULE}: a call that fails changes nothing",
    Needs.INPUT,
    level=RECOVERY,
    variants=_REFUSED,
)
async def refused(trial: Trial, variant: tuple[dict[str, Any], Code, tuple[str, ...]]) -> None:
    changes, code, reasons = variant
    step, _, flow = await started(trial, attempt=3)
    request = _request(step, inputs=[_input(trial, 4)])
    for name, value in changes.items():
        setattr(request.inputs[0].binding, name, value)
    await _refused(trial, request, code, *reasons)
    await complete(step, flow)


@case("consumer.rebind-same-attempt", f"{_RULE}: the same attempt with another peer", Needs.INPUT, level=RECOVERY)
async def same_attempt(trial: Trial) -> None:
    step, _, flow = await started(trial)
    await more(flow)
    request = _request(step, inputs=[_input(trial, 1)])
    request.inputs[0].binding.producer += ".other"
    await _rebind(trial, request)
    producer = trial.producer()
    producer.name += ".other"
    again = await (await producer.stream()).open(trial.key_in())
    await complete(step, again, chunks=3)


@case("consumer.rebind-missing-rows", f"{_RULE}: ROWS_MISSING with the rows in ErrorFacts", Needs.INPUT, level=RECOVERY)
async def missing_rows(trial: Trial) -> None:
    step, _, flow = await started(trial)
    await more(flow)
    tensor = trial.inputs.tensors[0]
    rows = tensor.rows(4)
    request = _request(step, inputs=[_input(trial, 2, **{tensor.name: rows + 1})])
    error = await _refused(trial, request, Code.FAILED_PRECONDITION, "ROWS_MISSING")
    expect_equal("ErrorFacts.rows", rows, error.facts.get("rows"))
    expect_equal("the metadata `tensor`", tensor.name, error.metadata.get("tensor"))
    unknown = _request(step, inputs=[_input(trial, 2, **{"conformance.none": 1})])
    await _refused(trial, unknown, Code.FAILED_PRECONDITION, "ROWS_MISSING")
    await complete(step, flow)


@case("consumer.rebind-after-failure", f"{_RULE}: a failed flow waits for RebindStep", Needs.INPUT, level=RECOVERY)
async def after_failure(trial: Trial) -> None:
    await trial.require_rebinding()
    step, stream, flow = await started(trial)
    await more(flow)
    stream.cut()
    second = await trial.stream(incarnation="second")
    stale = second.flow(trial.key_in())
    await stale.ask_open()
    await stale.rejected(None, "STALE_INCARNATION", "PEER_LOST")
    await _rebind(trial, _request(step, inputs=[_input(trial, 2)]))
    again = await second.open(trial.key_in(2))
    await _expect_attempt(trial, trial.edge_in, 2)
    await complete(step, again, chunks=3)


@case("consumer.rebind-after-end", f"{_RULE}: accept and discard the new flow of an edge that has ended", Needs.INPUT,
      Needs.OUTPUT, level=RECOVERY)  # fmt: skip
async def after_end(trial: Trial) -> None:
    consumer = await trial.consumer(raises=False)
    step = await trial.call(trial.request(consumer)).accepted()
    flow = await trial.feed(await trial.stream())
    await flow.acknowledged(len(flow.sent) + 1)
    await _rebind(trial, _request(step, inputs=[_input(trial, 2)]))
    await flow.committed()
    again = await trial.feed(await trial.stream(incarnation="second"), key=trial.key_in(2))
    await again.committed()
    await consumer.raise_limits(limit_bytes=1 << 40, chunks=1 << 30)
    await step.finished()


@case("producer.rebind", f"{_RULE}: all chunks from 0 with the same numbers and content (checklist 19)", Needs.OUTPUT,
      level=RECOVERY)  # fmt: skip
async def output(trial: Trial) -> None:
    first = await trial.consumer(raises=False, limit_bytes=1 << 30, limit_chunks=2)
    step = await trial.call(trial.request(first)).accepted()
    await trial.supply()
    await first.arrived(lambda each: len(each.chunks) == 2 or each.end, "two chunks")
    second = await trial.consumer()
    request = _request(step)
    trial.bind(request.outputs.add(), second, attempt=2)
    await _rebind(trial, request)
    await _expect_attempt(trial, request.outputs[0].edge, 2)
    await step.finished()
    second.check()
    found, before = second.only(), first.only()
    expect_equal("the attempt of the new flow", 2, found.key.attempt)
    same = [each.contents for each in found.chunks[: len(before.chunks)]] == [each.contents for each in before.chunks]
    expect(same, "the same first chunks", second.came)


@case("producer.rebind-after-end", f"{_RULE}: after the step has finished, or CHUNK_GONE", Needs.OUTPUT, level=RECOVERY)
async def after_finish(trial: Trial) -> None:
    def answer(consumer: Consumer, item: stage_pb2.PutItem) -> Any:
        if item.chunk.HasField("end"):
            return [consumer.take(item)[0]]
        return None

    first = await trial.consumer(answer=answer)
    step = await trial.call(trial.request(first)).accepted()
    await trial.supply()
    await step.finished()
    second = await trial.consumer()
    request = _request(step)
    trial.bind(request.outputs.add(), second, attempt=2)
    await _rebind(trial, request)
    await second.arrived(lambda each: each.end, "the whole flow again")
    second.check()
    await _expect_attempt(trial, request.outputs[0].edge, 2)
    expect_equal("the bytes", first.contents(trial.request_id), second.contents(trial.request_id))


@case("producer.rebind-below-lowest", f"{_RULE}: lowest_attempt of a call that attaches", Needs.OUTPUT, level=RECOVERY)
async def below_lowest(trial: Trial) -> None:
    step, peer, flow = await running(trial)
    assert peer is not None
    await trial.call(trial.repeated(attach_only=True, lowest_attempt=1001)).accepted()
    request = _request(step)
    trial.bind(request.outputs.add(), peer, attempt=2)
    error = await _refused(trial, request, Code.FAILED_PRECONDITION, "STALE_ATTEMPT")
    expect_equal("ErrorFacts.attempt", 1001, error.facts.get("attempt"))
    await resume(peer, flow)
    await step.finished()


_CONTENT: dict[str, Callable[[stage_pb2.OutputBinding], object]] = {
    "transform": lambda binding: setattr(binding, "transform", "conformance.none"),
    "tensors": lambda binding: binding.ClearField("tensors"),
    "tokens": lambda binding: setattr(binding, "tokens", stage_pb2.TOKEN_SELECTION_LAST),
}


@case("producer.rebind-refused", f"{_RULE}: what the edge transfers cannot change (INVALID_EDGE)", Needs.OUTPUT,
      level=RECOVERY, variants=_CONTENT)  # fmt: skip
async def output_content(trial: Trial, change: Callable[[stage_pb2.OutputBinding], object]) -> None:
    require(trial.stage.cut_tensor, "the stage emits nothing that has rows")
    step, peer, flow = await running(trial)
    assert peer is not None
    request = _request(step)
    trial.bind(request.outputs.add(), peer, attempt=2)
    change(request.outputs[0])
    await _refused(trial, request, Code.INVALID_ARGUMENT, "INVALID_EDGE")
    await resume(peer, flow)
    await step.finished()


@case("producer.rebind-stale", f"{_RULE}: a lower attempt fails", Needs.OUTPUT, level=RECOVERY)
async def output_stale(trial: Trial) -> None:
    step, peer, flow = await running(trial, attempt=3)
    assert peer is not None
    request = _request(step)
    trial.bind(request.outputs.add(), peer, attempt=2)
    await _refused(trial, request, Code.FAILED_PRECONDITION, "STALE_ATTEMPT")
    await resume(peer, flow)
    await step.finished()
