"""The calls ExecuteSteps, CancelStep and ProbeEdge."""

import asyncio
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
from stagemesh.stage_conformance.suites.steps import expect_released, resume, running
from stagemesh.stage_conformance.trial import Trial
from stagemesh.v1 import chunk_pb2, stage_pb2


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
    if trial.inputs.tensors:
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
