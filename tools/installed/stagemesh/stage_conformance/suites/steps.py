"""Steps: their events, repeated calls, attempts, cancellation, outputs and deadlines."""

import asyncio
from collections.abc import Callable
from typing import Any, Self

import grpc

from stagemesh.common.errors import Code
from stagemesh.stage_conformance.cases import (
    FURTHER,
    RECOVERY,
    MismatchError,
    Needs,
    NotServedError,
    answer_of,
    case,
    error_of,
    expect,
    expect_equal,
)
from stagemesh.stage_conformance.content import UNKNOWN_FIELD
from stagemesh.stage_conformance.peers import Consumer, Flow
from stagemesh.stage_conformance.trial import Step, Trial, require
from stagemesh.v1 import chunk_pb2, request_pb2, signature_pb2, stage_pb2
from stagemesh.v1.tensor_pb2 import TypedValue

_STEP = "A step"
_REPEATED = "A step: repeated calls (checklist 7)"
_ATTEMPTS = "A step: attempts (checklist 7)"
_TABLE = "A step: the table of kinds (checklist 9)"
_STREAMED_KINDS: dict[int, Callable[[request_pb2.Output], int]] = {
    signature_pb2.TENSOR_KIND_TEXT: lambda part: len(part.text.encode()),
    signature_pb2.TENSOR_KIND_TOKENS: lambda part: len(part.token_ids.ids),
    signature_pb2.TENSOR_KIND_AUDIO: lambda part: part.audio.samples.shape[0] if part.audio.samples.shape else 0,
    signature_pb2.TENSOR_KIND_MEDIA: lambda part: len(part.media.data),
    signature_pb2.TENSOR_KIND_TENSOR: lambda part: _rows(part.tensor),
}
"""The length of a part by the kind of its tensor. Images are counted by their last parts."""


def _rows(tensor: Any) -> int:
    return tensor.shape[0] if tensor.shape else 1


async def running(trial: Trial, *, attempt: int = 1, **consumer: Any) -> tuple[Step, Consumer | None, Flow | None]:
    """Starts a step that cannot end yet: it lacks the end of its input, or its consumer grants no credit."""
    peer = None
    if trial.stage.has_output:
        peer = await trial.consumer(**({} if trial.stage.inputs.tensors else {"raises": False}), **consumer)
    step = await trial.call(trial.request(peer, attempt=attempt)).accepted()
    flow = None
    if trial.stage.inputs.tensors:
        flow = await (await trial.stream()).open(trial.key_in(attempt))
        await flow.send(trial.stage.inputs.chunk(0, 4))
        await flow.acknowledged(1)
    else:
        require(peer, "a step without edges cannot be stopped from outside")
        assert peer is not None
        await peer.arrived(lambda each: each.openings, "`open` of the outgoing flow")
    return step, peer, flow


async def expect_released(consumer: Consumer | None, flow: Flow | None, *, within_s: float = 8.0) -> None:
    """Waits until the flows of a step that has ended early are rejected and aborted."""
    if flow is not None:
        await flow.rejected(None, within_s=within_s)
    elif consumer is not None:
        await consumer.arrived(lambda each: each.abort, "`abort` of the outgoing flow", within_s=within_s)


async def resume(peer: Consumer | None, flow: Flow | None) -> None:
    """Lets a step of `running` end."""
    if flow is not None:
        await flow.end()
    elif peer is not None:
        await peer.raise_limits(limit_bytes=1 << 40, chunks=1 << 30)


@case("steps.good-request", f"{_STEP}: accepted, events, finished (checklist 6)")
async def good_request(trial: Trial) -> None:
    good = await trial.good()
    kinds = [str(each.WhichOneof("event")) for each in good.events]
    expect(kinds.count("accepted") == 1 and kinds.count("finished") == 1, "one accepted and one finished", kinds)
    expect("None" not in kinds, "events with a kind", kinds)


@case("steps.finished", f"{_STEP} 2: `finished` has usage, timings and one EdgeUsage per outgoing edge", level=FURTHER)
async def finished(trial: Trial) -> None:
    event = (await trial.good()).events[-1].finished
    expect(event.HasField("usage") and event.HasField("timings"), "usage and timings", event)
    edges = [each.edge for each in event.edges]
    expect_equal("the edges", [trial.edge_out] if trial.stage.has_output else [], edges)


@case(
    "steps.finished-after-end",
    f"{_STEP} 3: finished only after every `end` is acknowledged (checklist 6)",
    Needs.OUTPUT,
)
async def finished_after_end(trial: Trial) -> None:
    withheld = list[Any]()

    def answer(consumer: Consumer, item: stage_pb2.PutItem) -> Any:
        if item.chunk.HasField("end"):
            withheld.append((consumer.connection, consumer.take(item)))
            return []
        return None

    consumer = await trial.consumer(answer=answer)
    step = await trial.call(trial.request(consumer)).accepted()
    if trial.stage.inputs.tensors:
        await trial.feed(await trial.stream())
    await consumer.until(lambda: withheld, "`end`", within_s=15)
    await asyncio.sleep(0.5)
    expect("finished" not in step.kinds() and not step.is_over, "no `finished` before the ack of `end`", step.came)
    connection, replies = withheld[0]
    await connection.reply(*replies)
    await step.finished()


@case(
    "steps.inputs-committed", f"{_STEP} 3: a finished step has committed its incoming edges (checklist 6)", Needs.INPUT
)
async def inputs_committed(trial: Trial) -> None:
    consumer = await trial.consumer() if trial.stage.has_output else None
    step = await trial.call(trial.request(consumer)).accepted()
    flow = await trial.feed(await trial.stream())
    await step.finished()
    await flow.committed()
    expect(not flow.all("rejected"), "no `rejected` of a flow that was read", flow.stream.came)


@case("steps.empty-input", "The digest: a flow without data chunks has the digest of no bytes", Needs.INPUT)
async def empty_input(trial: Trial) -> None:
    consumer = await trial.consumer() if trial.stage.has_output else None
    step = trial.call(trial.request(consumer))
    await step.accepted()
    flow = await trial.feed(await trial.stream(), chunks=0)
    await flow.acknowledged(1)
    await step.until(lambda: step.is_over, "an end of the step", within_s=15)


@case("steps.same-seed", f"{_STEP}: reproducible output (checklist 25)", level=RECOVERY)
async def same_seed(trial: Trial) -> None:
    first, second = await trial.good(), await trial.good()
    sizes = [{name: len(each) for name, each in one.contents.items()} for one in (first, second)]
    expect(first.contents == second.contents, f"the same bytes for the same seed, {sizes[0]}", f"others, {sizes[1]}")


@case("steps.priority", f"{_STEP}: `priority` may be ignored", variants={"low": -(2**31), "high": 2**31 - 1})
async def priority(trial: Trial, value: int) -> None:
    trial.expect_same(await trial.good(change=lambda request: setattr(request, "priority", value)))


@case("steps.choices", f"{_STEP}: each choice is a request of its own, ids are compared as a whole")
async def choices(trial: Trial) -> None:
    for each in await asyncio.gather(*(trial.good(f"{trial.request_id}.c{number}") for number in ("", "/1", "/2"))):
        trial.expect_same(each)


# -- repeated calls


@case("steps.repeated-after-end", _REPEATED)
async def repeated_after_end(trial: Trial) -> None:
    good = await trial.good(trial.request_id)
    again = trial.call(trial.repeated(attach_only=True))
    await again.finished()
    expect(
        again.events == list(good.events), f"the same {len(good.events)} events", f"{len(again.events)}; {again.came}"
    )


@case("steps.repeated-while-running", _REPEATED)
async def repeated_while_running(trial: Trial) -> None:
    step, peer, flow = await running(trial)
    again = await trial.call(trial.repeated()).accepted()
    await resume(peer, flow)
    await asyncio.gather(step.finished(), again.finished())
    expect(step.events == again.events, "the same events in the same order", again.came)


@case("steps.caller-returns", f"{_REPEATED}; stopped after 5 s without a call", waits_s=6)
async def caller_returns(trial: Trial) -> None:
    step, peer, flow = await running(trial)
    step.call.cancel()
    await asyncio.sleep(2.5)
    again = await trial.call(trial.repeated(attach_only=True)).accepted()
    await asyncio.sleep(3.5)
    await resume(peer, flow)
    await again.finished()


@case("steps.attach-only-unknown", _REPEATED)
async def attach_only_unknown(trial: Trial) -> None:
    request = trial.request()
    request.attach_only = True
    await trial.refused(request, Code.NOT_FOUND, "UNKNOWN_STEP")


@case("steps.attach-with-traceparent", f"{_REPEATED}: compared without attach_only and traceparent")
async def attach_with_traceparent(trial: Trial) -> None:
    step, peer, flow = await running(trial)
    await trial.call(trial.repeated(traceparent="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00")).accepted()
    await resume(peer, flow)
    await step.finished()


@case("steps.exists", f"{_REPEATED}: other content")
async def exists(trial: Trial) -> None:
    _, peer, flow = await running(trial, attempt=3)
    error = await trial.refused(trial.repeated(seed=8), Code.ALREADY_EXISTS, "STEP_EXISTS")
    expect_equal("ErrorFacts.attempt", 3, error.facts.get("attempt"))
    await resume(peer, flow)


@case("steps.exists-after-end", f"{_REPEATED}: other content")
async def exists_after_end(trial: Trial) -> None:
    await trial.good(trial.request_id)
    error = await trial.refused(trial.repeated(seed=8), Code.ALREADY_EXISTS, "STEP_EXISTS")
    expect_equal("ErrorFacts.attempt", 1, error.facts.get("attempt"))


# -- attempts


@case("steps.stale-attempt", _ATTEMPTS)
async def stale_attempt(trial: Trial) -> None:
    _, peer, flow = await running(trial, attempt=7)
    error = await trial.refused(trial.request(attempt=6), Code.FAILED_PRECONDITION, "STALE_ATTEMPT")
    expect_equal("ErrorFacts.attempt", 7, error.facts.get("attempt"))
    await resume(peer, flow)


@case("steps.stale-attempt-after-end", f"{_ATTEMPTS}: remember the highest attempt of the last 4,096 requests")
async def stale_attempt_after_end(trial: Trial) -> None:
    def change(request: Any) -> None:
        request.attempt, request.step_id = 5, f"{request.step_id}5"

    await trial.good(trial.request_id, change=change)
    await trial.refused(trial.request(attempt=4), Code.FAILED_PRECONDITION, "STALE_ATTEMPT")


@case("steps.higher-attempt", f"{_ATTEMPTS}: a higher attempt stops the steps of lower ones")
async def higher_attempt(trial: Trial) -> None:
    lower, peer, flow = await running(trial)
    consumer = await trial.consumer() if trial.stage.has_output else None
    higher = await trial.call(trial.request(consumer, attempt=2)).accepted()
    await lower.failed(None)
    await expect_released(peer, flow)
    if trial.stage.inputs.tensors:
        await trial.feed(await trial.stream(), key=trial.key_in(2))
    await higher.finished()
    if consumer is not None:
        consumer.check()


# -- ends


@case("steps.deadline", f"{_STEP}: a step ends at its deadline (checklist 10)")
async def deadline(trial: Trial) -> None:
    peer = None
    if trial.stage.has_output:
        peer = await trial.consumer(**({} if trial.stage.inputs.tensors else {"raises": False}))
    require(peer or trial.stage.inputs.tensors, "a step without edges cannot be stopped from outside")
    await trial.call(trial.request(peer), timeout_s=2.0).accepted()
    flow = None
    if trial.stage.inputs.tensors:
        flow = await (await trial.stream()).open(trial.key_in())
    await expect_released(peer, flow, within_s=4.5)


@case("steps.last-caller-leaves", "Time limits: a step without callers is stopped after 5 s (checklist 10)", waits_s=5)
async def last_caller_leaves(trial: Trial) -> None:
    step, peer, flow = await running(trial)
    step.call.cancel()
    await asyncio.sleep(3.0)
    is_released = (
        bool(flow.all("rejected")) if flow else any(each.abort for each in peer.flows.values()) if peer else False
    )
    expect(not is_released, "a step that waits 5 s for another call", "it was stopped within 3 s")
    await expect_released(peer, flow, within_s=6.0)


async def cancel(trial: Trial, **fields: Any) -> stage_pb2.CancelStepResponse:
    """Calls CancelStep for the request of the trial."""
    fields = {"request_id": trial.request_id, **fields}
    request = stage_pb2.CancelStepRequest(reason="conformance", **fields)
    return await answer_of(trial.stub.CancelStep(request, timeout=5))


@case("steps.cancel", "Other calls: CancelStep (time limit 5 s)", level=RECOVERY)
async def cancel_step(trial: Trial) -> None:
    step, peer, flow = await running(trial)
    expect_equal("`stopped`", 1, (await cancel(trial)).stopped)
    await step.failed(Code.CANCELLED, within_s=5)
    if flow is not None:
        await flow.rejected(Code.UNAVAILABLE, "PEER_LOST")
    else:
        await expect_released(peer, flow)
    expect_equal("`stopped` of a second call", 0, (await cancel(trial)).stopped)


@case("steps.cancel-unknown", "Other calls: CancelStep of a request that does not run", level=RECOVERY)
async def cancel_unknown(trial: Trial) -> None:
    expect_equal("`stopped`", 0, (await cancel(trial, request_id=f"{trial.request_id}.none")).stopped)


@case("steps.cancel-attempt", "CancelStepRequest.attempt: this attempt and all earlier ones", level=RECOVERY)
async def cancel_attempt(trial: Trial) -> None:
    step, peer, flow = await running(trial, attempt=3)
    expect_equal("`stopped` of attempt 2", 0, (await cancel(trial, attempt=2)).stopped)
    expect(not step.is_over, "attempt 3 runs on", step.came)
    expect_equal("`stopped` of attempt 3", 1, (await cancel(trial, attempt=3)).stopped)
    await expect_released(peer, flow)


@case("steps.cancel-when-left", "CancelStepRequest.when_left spares steps that another caller follows", level=FURTHER)
async def cancel_when_left(trial: Trial) -> None:
    step, peer, flow = await running(trial)
    expect_equal("`stopped` while a call runs", 0, (await cancel(trial, when_left=True)).stopped)
    await resume(peer, flow)
    await step.finished()


# -- outputs


@case("steps.positions", _TABLE)
async def positions(trial: Trial) -> None:
    require(trial.stage.emits, "the stage reports no emitted tensors")
    step = await _streamed(trial)
    kinds = {each.spec.name: each.kind for each in trial.stage.emits}
    for name, parts in step.outputs().items():
        expect(name in kinds, "outputs that were asked for", name)
        at = 0
        for part in parts:
            expect(part.position == at, f"position {at} in an output {name!r}", part.position)
            if kinds[name] == signature_pb2.TENSOR_KIND_IMAGE:
                at += part.image.last
            elif part.WhichOneof("content"):
                at += _STREAMED_KINDS[kinds[name]](part)


async def _streamed(trial: Trial) -> Step:
    """Runs a request whose outputs are all streamed."""
    step = await trial.call(trial.request()).accepted()
    if trial.stage.inputs.tensors:
        await trial.feed(await trial.stream())
    await step.finished()
    return step


@case("steps.content", _TABLE)
async def content(trial: Trial) -> None:
    require(trial.stage.emits, "the stage reports no emitted tensors")
    wanted = {
        signature_pb2.TENSOR_KIND_TEXT: "text",
        signature_pb2.TENSOR_KIND_TOKENS: "token_ids",
        signature_pb2.TENSOR_KIND_AUDIO: "audio",
        signature_pb2.TENSOR_KIND_IMAGE: "image",
        signature_pb2.TENSOR_KIND_MEDIA: "media",
        signature_pb2.TENSOR_KIND_TENSOR: "tensor",
    }
    kinds = {each.spec.name: wanted[each.kind] for each in trial.stage.emits}
    for name, parts in (await _streamed(trial)).outputs().items():
        found = {part.WhichOneof("content") for part in parts} - {None}
        expect(found <= {kinds.get(name)}, f"content of the kind {kinds.get(name)} in {name!r}", found)
        large = max(part.ByteSize() for part in parts)
        expect(large <= 8 << 20, "parts of at most 8 MiB", large)


@case("steps.finish-parts", f"{_STEP}: a last part with `finish` for each streamed name (checklist 9)")
async def finish_parts(trial: Trial) -> None:
    require(trial.stage.emits, "the stage reports no emitted tensors")
    outputs = (await _streamed(trial)).outputs()
    for each in trial.stage.emits:
        parts = outputs.get(each.spec.name, [])
        finishes = [part.HasField("finish") for part in parts]
        expect(
            finishes[-1:] == [True] and not any(finishes[:-1]),
            f"`finish` in the last part of {each.spec.name!r}",
            finishes,
        )
        reason = parts[-1].finish.reason
        expect(reason != request_pb2.FINISH_REASON_UNSPECIFIED, "a reason of the finish", reason)


@case("steps.not-streamed", f"{_STEP}: only tensors that are named in `streamed` are returned", Needs.OUTPUT)
async def not_streamed(trial: Trial) -> None:
    outputs = [each for each in (await trial.good()).events if each.HasField("output")]
    expect(not outputs, "no output events", f"{len(outputs)} of them")


# -- ExecuteSteps

_MANY = "Other calls: ExecuteSteps"


class _Calls:
    """A stream of ExecuteSteps."""

    def __init__(self, trial: Trial) -> None:
        self.call: Any = trial.stub.ExecuteSteps(timeout=15)
        self.kinds: dict[int, list[str]] = {}
        self.errors: dict[int, chunk_pb2.Error] = {}

    @classmethod
    async def opened(cls, trial: Trial) -> Self:
        """Opens a stream. Raises NotServedError if the stage does not serve the method."""
        # A write to a stream that has ended would fail without the status.
        probe: Any = trial.stub.ExecuteSteps(timeout=5)
        await probe.done_writing()
        if await probe.code() is grpc.StatusCode.UNIMPLEMENTED:
            raise NotServedError
        return cls(trial)

    async def start(self, number: int, request: stage_pb2.ExecuteStepRequest) -> None:
        await self.write(stage_pb2.ExecuteStepsRequest(call=number, start=stage_pb2.StartStep(step=request)))

    async def write(self, request: stage_pb2.ExecuteStepsRequest) -> None:
        try:
            await self.call.write(request)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            await self.ended(0)

    async def ended(self, *numbers: int) -> None:
        """Reads until these calls have ended."""
        try:
            while not all(self.kinds.get(each, [""])[-1] == "ended" for each in numbers):
                response = await self.call.read()
                expect(response is not grpc.aio.EOF, f"the end of the calls {numbers}", "the end of the stream")
                for each in response.messages:
                    event = each.event.WhichOneof("event") if each.HasField("event") else each.WhichOneof("message")
                    self.kinds.setdefault(each.call, []).append(str(event))
                    if each.ended.HasField("error"):
                        self.errors[each.call] = each.ended.error
        except grpc.aio.AioRpcError as exc:
            error = error_of(exc)
            raise MismatchError(f"the end of the calls {numbers}", f"{error.code.name} {error.message}") from exc


@case("steps.many", _MANY, level=FURTHER)
async def many(trial: Trial) -> None:
    calls = await _Calls.opened(trial)
    consumer = await trial.consumer() if trial.stage.has_output else None
    ids = [f"{trial.request_id}.{number}" for number in range(3)]
    for number, each in enumerate(ids, 1):
        await calls.start(number, trial.request(consumer, request_id=each))
    unknown = trial.request(request_id=f"{trial.request_id}.none")
    unknown.attach_only = True
    await calls.start(9, unknown)
    await calls.ended(9)
    expect_equal("the error of the call", "UNKNOWN_STEP", calls.errors[9].reason)
    if trial.stage.inputs.tensors:
        stream = await trial.stream()
        for each in ids:
            await trial.feed(stream, key=trial.key_in(request_id=each))
    await calls.ended(1, 2, 3)
    for number in (1, 2, 3):
        kinds = calls.kinds[number]
        expect(kinds[0] == "accepted" and kinds[-2:] == ["finished", "ended"], "accepted … finished, ended", kinds)
    calls.call.cancel()


@case("steps.many-number-in-use", f"{_MANY}: a number that is in use fails the stream", Needs.INPUT, level=FURTHER)
async def many_number_in_use(trial: Trial) -> None:
    calls = await _Calls.opened(trial)
    consumer = await trial.consumer() if trial.stage.has_output else None
    for _ in range(2):
        await calls.start(1, trial.request(consumer))
    try:
        await calls.ended(1)
    except MismatchError as exc:
        expect(exc.came.startswith("INVALID_ARGUMENT"), "INVALID_ARGUMENT", exc.came)
    else:
        raise MismatchError("the end of the stream", "the call continues")
    calls.call.cancel()


@case("steps.many-unknown-action", f"{_MANY}: an unknown action ends its call (UNKNOWN_KIND)", level=FURTHER)
async def many_unknown_action(trial: Trial) -> None:
    calls = await _Calls.opened(trial)
    for number, is_ignorable in ((4, True), (5, False)):
        request = stage_pb2.ExecuteStepsRequest(call=number, ignorable=is_ignorable)
        request.MergeFromString(UNKNOWN_FIELD)
        await calls.write(request)
    await calls.ended(5)
    expect_equal("the error of the call", "UNKNOWN_KIND", calls.errors[5].reason)
    expect(4 not in calls.kinds, "an ignorable action is ignored", calls.kinds)
    calls.call.cancel()


@case("steps.probe-edge", "Other calls: ProbeEdge", Needs.OUTPUT, level=FURTHER)
async def probe_edge(trial: Trial) -> None:
    consumer = await trial.consumer()
    request = stage_pb2.ProbeEdgeRequest(
        edge=trial.edge_out, consumer=consumer.name, endpoint=consumer.endpoint, connector=chunk_pb2.CONNECTOR_AUTO
    )
    answer = await answer_of(trial.stub.ProbeEdge(request, timeout=3))
    expect_equal("the connector", chunk_pb2.CONNECTOR_GRPC, answer.connector)
    consumer.check()


# -- parameters


@case("steps.option-values", "A step: reject values that are not allowed (INVALID_OPTION)")
async def option_values(trial: Trial) -> None:
    options = trial.stage.described.signature.options
    require(options, "the stage declares no options")
    for number, each in enumerate(options):
        kind = each.default_value.WhichOneof("kind")
        wrong = [TypedValue(text="x")] if kind != "text" else [TypedValue(integer=1)]
        if each.HasField("maximum") and kind in {"integer", "number"}:
            wrong.append(TypedValue(integer=int(each.maximum) + 1))
        if each.HasField("minimum") and kind in {"integer", "number"}:
            wrong.append(TypedValue(integer=int(each.minimum) - 1))
        if each.allowed_texts:
            wrong.append(TypedValue(text="conformance.none"))
        for index, value in enumerate(wrong):
            request = trial.request(request_id=f"{trial.request_id}.{number}.{index}")
            request.parameters.options[each.name].CopyFrom(value)
            await trial.refused(request, Code.INVALID_ARGUMENT, "INVALID_OPTION")


@case("steps.missing-input", "A step: reject the step if an absent tensor is required (MISSING_INPUT)", Needs.INPUT)
async def missing_input(trial: Trial) -> None:
    required = [each.name for each in trial.stage.inputs.tensors if not each.is_optional]
    require(required, "no tensor is required")
    request = trial.request()
    request.absent.extend(required)
    await trial.refused(request, Code.INVALID_ARGUMENT, "MISSING_INPUT")


@case("steps.file-output", "A step: outputs as files; a stage that cannot encode rejects the step", level=FURTHER)
async def file_output(trial: Trial) -> None:
    require(trial.stage.emits, "the stage reports no emitted tensors")
    request = trial.request()
    request.streamed[0].media_type = "conformance/none"
    await trial.refused(request, None)


@case("steps.absent", "A step: absent tensors are not waited for (checklist 8)", Needs.INPUT)
async def absent(trial: Trial) -> None:
    tensors = trial.stage.inputs.tensors
    optional = [each.name for each in tensors if each.is_optional]
    kept = tuple(each for each in tensors if not each.is_optional) or tensors[:1]
    missing = [name for name in optional if name not in {each.name for each in kept}]
    require(missing, "no accepted tensor can be absent")
    consumer = await trial.consumer() if trial.stage.has_output else None
    request = trial.request(consumer)
    request.absent.extend(missing)
    step = await trial.call(request).accepted()
    flow = await (await trial.stream()).open(trial.key_in())
    for number in range(2):
        payload = trial.stage.inputs.chunk(number, 4)
        indexes = [index for index, each in enumerate(payload.data.tensors) if each.name in missing]
        for index in reversed(indexes):
            del payload.data.tensors[index], payload.contents[index]
        payload.data.size_bytes = payload.size_bytes
        await flow.send(payload)
    await flow.end()
    await step.finished()
