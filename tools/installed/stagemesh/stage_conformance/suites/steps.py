"""Steps: their events, repeated calls, attempts and ends."""

import asyncio
from typing import Any

from stagemesh.common.errors import Code
from stagemesh.stage_conformance.cases import FURTHER, RECOVERY, Needs, case, expect, expect_equal
from stagemesh.stage_conformance.played_consumer import Consumer
from stagemesh.stage_conformance.played_producer import Flow
from stagemesh.stage_conformance.trial import Step, Trial, expect_contents, require
from stagemesh.v1 import stage_pb2

_STEP = "A step"
_REPEATED = "A step: repeated calls (checklist 7)"
_ATTEMPTS = "A step: attempts (checklist 7)"


async def running(trial: Trial, *, attempt: int = 1, **consumer: Any) -> tuple[Step, Consumer | None, Flow | None]:
    """Starts a step that cannot end yet: it lacks the end of its input, or its consumer grants no credit."""
    step, peer = await trial.start(attempt=attempt, raises=bool(trial.inputs.tensors), **consumer)
    flow = None
    if trial.inputs.tensors:
        flow = await (await trial.stream()).open(trial.key_in(attempt))
        await flow.send(trial.inputs.chunk(0, 4))
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
    await trial.supply()
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
    step, _ = await trial.start()
    flow = await trial.feed(await trial.stream())
    await step.finished()
    await flow.committed()
    expect(not flow.all("rejected"), "no `rejected` of a flow that was read", flow.stream.came)


@case("steps.empty-input", "The digest: a flow without data chunks has the digest of no bytes", Needs.INPUT)
async def empty_input(trial: Trial) -> None:
    step, _ = await trial.start()
    flow = await trial.feed(await trial.stream(), chunks=0)
    await flow.acknowledged(1)
    await step.until(lambda: step.is_over, "an end of the step", within_s=15)


@case("steps.same-seed", f"{_STEP}: reproducible output (checklist 25)", level=RECOVERY)
async def same_seed(trial: Trial) -> None:
    first, second = await trial.good(), await trial.good()
    expect_contents("the same result for the same seed", first.contents, second.contents)


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
    higher, consumer = await trial.start(attempt=2)
    await lower.failed(Code.FAILED_PRECONDITION, "STALE_ATTEMPT")
    await expect_released(peer, flow)
    await trial.supply(key=trial.key_in(2))
    await higher.finished()
    if consumer is not None:
        consumer.check()


# -- ends


@case("steps.deadline", f"{_STEP}: a step ends at its deadline (checklist 10)")
async def deadline(trial: Trial) -> None:
    peer = await trial.consumer(raises=bool(trial.inputs.tensors)) if trial.stage.has_output else None
    require(peer or trial.inputs.tensors, "a step without edges cannot be stopped from outside")
    await trial.call(trial.request(peer), timeout_s=2.0).accepted()
    flow = None
    if trial.inputs.tensors:
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
