"""Tests that a request survives the loss of its connection or orchestrator, and its caller gets each event once."""

import asyncio

import numpy as np
import pytest

from stagemesh.client import Admitted, AsyncClient, Event, Finished, Progress, RetryPolicy, Text
from stagemesh.client.received_events import ClientPosition
from stagemesh.client.responses import ResultBuilder
from stagemesh.common import errors
from stagemesh.common.wire.tensors import inline_tensor
from stagemesh.v1.orchestrator_pb2 import GenerateRequest, GenerateResponse
from stagemesh.v1.request_pb2 import FINISH_REASON_FAILED, Finish, Media, Output, TokenIds
from tests.client.conftest import Generate
from tests.client.scripted import Pause, Script, ScriptedOrchestrator, admitted, audio, finished, progress, queued, text
from tests.client.session_drivers import QUICK


def _stops() -> errors.StagemeshError:
    return errors.UnavailableError("it stops", reason="NOT_RUNNING", retry_after_s=0.01)


def _positions(request: GenerateRequest) -> dict[str, int]:
    return {each.name: each.position for each in request.next_positions}


def _text_of(events: list[Event]) -> str:
    return "".join(event.delta for event in events if isinstance(event, Text))


@pytest.mark.parametrize("loss", [Pause.BREAK, _stops()], ids=["broken connection", "orchestrator that stops"])
async def test_a_lost_request_continues(
    orchestrator: ScriptedOrchestrator, generate: Generate, loss: Pause | errors.StagemeshError
) -> None:
    orchestrator.scripts.extend([[admitted(), text("Hi "), loss], [admitted(), text("you"), finished()]])
    events = await generate(orchestrator.endpoint)
    assert [type(event) for event in events] == [Admitted, Text, Text, Finished]
    assert _text_of(events) == "Hi you"


@pytest.mark.parametrize("first", [[], [queued(1)]], ids=["unanswered", "queued"])
async def test_a_request_that_a_stopping_server_has_not_accepted_is_sent_again(
    orchestrator: ScriptedOrchestrator, generate: Generate, first: list[GenerateResponse]
) -> None:
    orchestrator.scripts.extend([[*first, Pause.STOP], [admitted(), text("Hi"), finished()]])
    assert _text_of(await generate(orchestrator.endpoint)) == "Hi"


async def test_the_next_call_sends_received_positions(orchestrator: ScriptedOrchestrator, generate: Generate) -> None:
    orchestrator.scripts.append([admitted(seed=9), text("Zoë 😀e\u0301"), audio([0.5, 1]), text("€!"), Pause.BREAK])
    orchestrator.scripts.append([admitted(seed=9), finished()])
    await generate(orchestrator.endpoint)
    first, second = orchestrator.requests
    assert _positions(second) == {"text": 16, "audio": 2}
    assert (second.parameters.seed, second.earlier_calls, second.request_id) == (9, 1, first.request_id)
    assert (_positions(first), first.earlier_calls) == ({}, 0)
    assert not first.HasField("admitted_call")
    assert (second.admitted_call, dict(second.preferred_replicas)) == (0, {"thinker": "thinker-0"})
    assert not first.parameters.HasField("seed")
    assert first.linger_s == second.linger_s == 5


FULL: Script = [errors.OverloadedError("full", retry_after_s=0.02)]


@pytest.mark.parametrize("before", [[], [FULL] * 4], ids=["at once", "when it is not full"])
async def test_the_next_orchestrator_continues_the_request(
    orchestrator: ScriptedOrchestrator, generate: Generate, other: ScriptedOrchestrator, before: list[Script]
) -> None:
    orchestrator.scripts.append([admitted(), text("Hi "), Pause.BREAK])
    other.scripts.extend([*before, [queued(1), admitted(), text("you"), finished()]])
    events = await generate(orchestrator.endpoint, other.endpoint)
    assert [type(event) for event in events] == [Admitted, Text, Text, Finished]
    assert _text_of(events) == "Hi you"
    assert len(orchestrator.requests) == 1


async def test_the_request_finishes_once_although_another_orchestrator_repeats_it(
    orchestrator: ScriptedOrchestrator, generate: Generate, other: ScriptedOrchestrator
) -> None:
    end = finished()
    end.finished.timings.finished_s += 1
    orchestrator.scripts.append([admitted(), text("Hi"), finished(), Pause.BREAK])
    other.scripts.append([admitted(), end])
    events = await generate(orchestrator.endpoint, other.endpoint)
    assert [type(event) for event in events].count(Finished) == 1


async def test_an_unreachable_orchestrator_is_skipped(orchestrator: ScriptedOrchestrator) -> None:
    orchestrator.scripts.append([admitted(), text("Hi"), finished()])
    policy = RetryPolicy(attempts=1)
    async with AsyncClient("127.0.0.1:1", orchestrator.endpoint, retry_policy=policy) as client:
        assert (await client.generate("hello").result()).text == "Hi"
        assert client.endpoint == orchestrator.endpoint
        await client.describe()


async def test_a_request_that_failed_is_not_run_again(orchestrator: ScriptedOrchestrator, generate: Generate) -> None:
    orchestrator.scripts.extend(
        [[admitted(), text("Hi "), Pause.BREAK], [admitted(), errors.InternalError("out of luck")]]
    )
    with pytest.raises(errors.InternalError, match="out of luck"):
        await generate(orchestrator.endpoint)
    assert len(orchestrator.requests) == 2


async def test_progress_is_not_reported_twice(orchestrator: ScriptedOrchestrator, generate: Generate) -> None:
    steps = [progress("thinker", steps=step) for step in (1, 2, 3)]
    orchestrator.scripts.extend([[admitted(), *steps[:2], Pause.BREAK], [admitted(), *steps, finished()]])
    events = await generate(orchestrator.endpoint)
    assert [event.engine_steps for event in events if isinstance(event, Progress)] == [1, 2, 3]


async def test_the_search_for_a_lost_request_is_bounded(orchestrator: ScriptedOrchestrator, generate: Generate) -> None:
    orchestrator.scripts.extend([[admitted(), text("Hi "), Pause.BREAK], [Pause.BREAK]])
    with pytest.raises(errors.UnavailableError, match="Socket closed"):
        await generate(orchestrator.endpoint, policy=RetryPolicy(first_pause_s=0.01, reattach_s=2))
    assert len(orchestrator.requests) > 3


async def test_a_repeatedly_lost_request_is_abandoned(orchestrator: ScriptedOrchestrator, generate: Generate) -> None:
    orchestrator.scripts.append([admitted(), Pause.BREAK])
    with pytest.raises(errors.UnavailableError, match="Socket closed"):
        await generate(orchestrator.endpoint, policy=RetryPolicy(attempts=3, first_pause_s=0.01, reattach_s=0.1))
    assert 4 <= len(orchestrator.requests) < 10


async def test_progress_permits_any_number_of_losses(orchestrator: ScriptedOrchestrator, generate: Generate) -> None:
    letters = "abcdefghij"
    orchestrator.scripts.extend([[admitted(), text(letter), Pause.BREAK] for letter in letters])
    orchestrator.scripts.append([admitted(), finished()])
    assert _text_of(await generate(orchestrator.endpoint)) == letters


async def test_the_deadline_holds_over_all_calls(orchestrator: ScriptedOrchestrator, generate: Generate) -> None:
    orchestrator.scripts.extend([[admitted(), text("Hi"), Pause.BREAK], [Pause.BREAK]])
    with pytest.raises((errors.UnavailableError, errors.DeadlineError)):
        await asyncio.wait_for(generate(orchestrator.endpoint, timeout_s=0.5), 10)
    assert orchestrator.deadlines_s[-1] is not None
    assert orchestrator.deadlines_s[-1] < 0.5


async def test_without_reattaching_a_loss_is_an_error(orchestrator: ScriptedOrchestrator, generate: Generate) -> None:
    orchestrator.scripts.append([admitted(), Pause.BREAK])
    with pytest.raises(errors.UnavailableError):
        await generate(orchestrator.endpoint, policy=RetryPolicy(reattach_s=0))
    assert [request.linger_s for request in orchestrator.requests] == [0]


async def test_leaving_the_loop_revokes_the_linger_time(orchestrator: ScriptedOrchestrator) -> None:
    orchestrator.scripts.append([admitted(), Pause.FOREVER])
    async with AsyncClient(orchestrator.endpoint) as client:
        call = client.generate("hello")
        async for _event in call:
            break
    assert [(each.request_id, each.when_left) for each in orchestrator.cancels] == [(call.request_id, True)]


async def test_closing_the_client_revokes_the_linger_time(orchestrator: ScriptedOrchestrator) -> None:
    orchestrator.scripts.append([admitted(), Pause.FOREVER])
    client = AsyncClient(orchestrator.endpoint)
    call = client.generate("hello")
    events = aiter(call)
    await anext(events)
    await client.close()
    assert [(each.request_id, each.when_left) for each in orchestrator.cancels] == [(call.request_id, True)]
    with pytest.raises(asyncio.CancelledError):
        await anext(events)


async def test_a_closed_client_makes_no_calls() -> None:
    client = AsyncClient("127.0.0.1:1")
    events = aiter(client.generate("hello"))
    await client.close()
    with pytest.raises(errors.CancelledRequestError, match="closed"):
        await anext(events)


async def test_a_finished_request_is_not_revoked(orchestrator: ScriptedOrchestrator) -> None:
    orchestrator.scripts.extend([[admitted(), finished()], [errors.InternalError("no")]])
    async with AsyncClient(orchestrator.endpoint) as client:
        await client.generate("hello").result()
        with pytest.raises(errors.InternalError):
            await client.generate("hello").result()
    assert orchestrator.cancels == []


async def test_cancel_finds_the_orchestrator(orchestrator: ScriptedOrchestrator, other: ScriptedOrchestrator) -> None:
    other.requests.append(GenerateRequest(request_id="r"))
    async with AsyncClient("127.0.0.1:1", orchestrator.endpoint, other.endpoint) as client:
        await client.cancel("r")
        with pytest.raises(errors.NotFoundError):
            await client.cancel("nobody")
    assert [each.request_id for each in other.cancels] == ["r", "nobody"]


async def test_a_client_needs_an_endpoint() -> None:
    with pytest.raises(ValueError, match="at least one endpoint"):
        AsyncClient()


def test_every_kind_of_output_is_counted() -> None:
    delivery = ClientPosition(GenerateRequest(), QUICK)
    outputs = [
        Output(name="codes", token_ids=TokenIds(ids=[5, 6])),
        Output(name="picture", image=Media(data=b"png", last=True)),
        Output(name="rows", tensor=inline_tensor("rows", np.zeros((3, 2), np.int8))),
        Output(name="scalar", tensor=inline_tensor("scalar", np.zeros((), np.int8))),
        Output(name="codes", position=2, token_ids=TokenIds(ids=[7])),
    ]
    for output in outputs:
        delivery.take(GenerateResponse(output=output))
    assert _positions(delivery.request()) == {"codes": 3, "picture": 1, "rows": 3, "scalar": 1}


async def test_each_choice_continues_where_it_was(orchestrator: ScriptedOrchestrator) -> None:
    first = [text("Hi ", index=1), text("You"), progress("thinker", steps=2), progress("thinker", steps=3, index=1)]
    orchestrator.scripts.append([admitted(choices=2, seed=2**63 - 1), *first, Pause.BREAK])
    repeated = [progress("thinker", steps=3), progress("thinker", steps=3, index=1), text("there", index=1)]
    orchestrator.scripts.append([admitted(choices=2, seed=2**63 - 1), *repeated, text("?"), finished(2)])
    async with AsyncClient(orchestrator.endpoint, retry_policy=QUICK) as client:
        events = client.generate("hello", choices=2)
        builder, steps = ResultBuilder(), list[tuple[int, int]]()
        async for event in events:
            builder.add(event)
            if isinstance(event, Progress):
                steps.append((event.index, event.engine_steps))
    result = builder.build()
    assert [(choice.seed, choice.text) for choice in result.choices] == [(2**63 - 1, "You?"), (0, "Hi there")]
    assert (result.text, result.seed, steps) == ("You?", 2**63 - 1, [(0, 2), (1, 3), (0, 3)])
    sent = orchestrator.requests
    positions = [(each.name, each.index, each.position) for each in sent[1].next_positions]
    assert positions == [("text", 1, 3), ("text", 0, 3)]
    assert [each.parameters.choices for each in sent] == [2, 2]


def test_a_part_that_arrives_twice_is_dropped_and_a_gap_is_an_error() -> None:
    delivery = ClientPosition(GenerateRequest(), QUICK)
    part = GenerateResponse(output=Output(name="text", text="Hi"))
    assert [len(delivery.take(part)) for _ in range(2)] == [1, 0]
    with pytest.raises(errors.InternalError, match="continues at 5, but only 2 were received"):
        delivery.take(GenerateResponse(output=Output(name="text", position=5, text="!")))


async def test_a_request_that_failed_while_the_connection_broke_may_succeed_elsewhere() -> None:
    delivery = ClientPosition(GenerateRequest(), QUICK)
    failed = Output(name="text", position=2, finish=Finish(reason=FINISH_REASON_FAILED))
    for output in (Output(name="text", text="Hi"), failed, Output(name="text", position=2, text=" you")):
        assert delivery.take(GenerateResponse(output=output))
    assert delivery.take(finished())
    assert not delivery.take(finished())


async def test_a_rejected_call_is_not_an_earlier_one(orchestrator: ScriptedOrchestrator, generate: Generate) -> None:
    orchestrator.scripts.extend(
        [[errors.OverloadedError("full", retry_after_s=0.01)], [_stops()], [admitted(), finished()]]
    )
    await generate(orchestrator.endpoint)
    assert [request.earlier_calls for request in orchestrator.requests] == [0, 0, 0]


def test_an_invalid_policy_is_rejected() -> None:
    with pytest.raises(ValueError, match="reattach_s is -1"):
        RetryPolicy(reattach_s=-1)
