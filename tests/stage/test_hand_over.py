"""Hand-over tickets in the steps of a stage."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace

import numpy as np
import pytest

from stagemesh.common.errors import InvalidChunkError, NotReadyError, StagemeshError, UnsupportedError
from stagemesh.common.plugins.connectors import GRPC
from stagemesh.common.plugins.descriptors import Emitted, Signature, TransformDescriptor
from stagemesh.common.wire.chunk_sizes import StepPolicy
from stagemesh.common.wire.tensors import TensorSpec
from stagemesh.conformance import Host, until
from stagemesh.connectors.flow.outlet import Outlet
from stagemesh.connectors.packets import ConsumerAddress, EdgeKey, OfferedTicket, Packet
from stagemesh.fake_engine import KIND, STATE
from stagemesh.fake_engine.engine import FakeEngine
from stagemesh.services.engines.abilities import EngineAbilities, HandsOver
from stagemesh.services.engines.user_errors import UserErrors
from stagemesh.services.stage.step import inputs
from stagemesh.services.stage.step.checks import check_handover
from stagemesh.services.stage.step.inputs import accepted_part
from stagemesh.services.stage.step.spec import InputBinding, OutputBinding, StepSpec
from tests.connectors.hosts import started_host
from tests.connectors.offers import Offers
from tests.rpc.call_errors import raises
from tests.stage.replicas import Replica, events_of, ready_runtime, served_stage, stage_config, step_spec

ACCEPTS = {"kv": TensorSpec.ticket("test.state"), "text": TensorSpec("uint8", ("bytes",))}


def decode_spec(request_id: str) -> StepSpec:
    return replace(step_spec(request_id), inputs=(InputBinding(edge="a->b", peer="a-0"),))


@asynccontextmanager
async def decode_stage() -> AsyncGenerator[tuple[Host, Replica]]:
    """Yields a producer whose messages the test sends, and a decode stage."""
    async with started_host("a-0") as producer, served_stage(stage_config("decode", function="decode")) as stage:
        producer.plane._identity.pipeline, producer.plane._identity.generation = "test", "1"
        yield producer, stage


def flow_to(stage: Replica, producer: Host, request_id: str) -> Outlet:
    return producer.plane.open_outlet(
        EdgeKey(request_id, "a->b", 1), ConsumerAddress("decode-0", stage.endpoint), connector=GRPC, policy=StepPolicy()
    )


async def send(outlet: Outlet, descriptor: bytes, *, kind: str = KIND) -> None:
    ticket = OfferedTicket(kind, descriptor, size_bytes=1, time_limit_s=30, on_release=lambda: None)
    await outlet.send(Packet({}, tickets={STATE: ticket}))
    await outlet.finish()


async def test_emitted_ticket_that_no_edge_carries_is_released() -> None:
    async with ready_runtime(stage_config("prefill", function="prefill")) as runtime:
        assert (await events_of(runtime, step_spec(streamed=())))[-1].HasField("finished")
        assert isinstance(runtime.engine, FakeEngine)
        assert runtime.engine.states.counts.offered == runtime.engine.states.counts.released == 1


async def test_ticket_of_a_step_that_was_stopped_is_released() -> None:
    async with ready_runtime(stage_config("prefill", function="prefill")) as runtime:
        unreachable = OutputBinding("a->b", ConsumerAddress("b-0", "127.0.0.1:9"), GRPC, StepPolicy())
        running = asyncio.create_task(events_of(runtime, replace(step_spec(), streamed=(), outputs=(unreachable,))))
        assert isinstance(runtime.engine, FakeEngine)
        states = runtime.engine.states
        await until(lambda: bool(states.counts.offered), timeout_s=5)
        await runtime.cancel("r", attempt=0, reason="the test ends")
        with pytest.raises(StagemeshError):
            await running
        assert states.counts.released == 1


async def test_bad_descriptor_fails_its_own_request_alone() -> None:
    async with decode_stage() as (producer, stage):
        bad, good = (asyncio.create_task(events_of(stage.runtime, decode_spec(request))) for request in ("bad", "good"))
        prefill = FakeEngine(stage_config("prefill", function="prefill"))
        await prefill.states.start()
        content = np.resize(np.frombuffer(b"0123456789abcdef" * 2, np.uint8), 1000).tobytes()
        ticket = prefill.states.offer(content, time_limit_s=30)
        outlet = flow_to(stage, producer, "good")
        await outlet.send(Packet({}, tickets={STATE: ticket}))
        ticket.release()
        await send(flow_to(stage, producer, "bad"), b"not a descriptor")
        with raises(StagemeshError, reason="INVALID_TICKET"):
            await bad
        await outlet.finish()
        assert (await good)[-1].HasField("finished")
        assert prefill.states.counts.released == 1
        await prefill.close()


async def test_ticket_of_a_kind_that_the_stage_does_not_accept_is_rejected() -> None:
    async with decode_stage() as (producer, stage):
        step = asyncio.create_task(events_of(stage.runtime, decode_spec("r")))
        with raises(UnsupportedError, reason="TICKET_REFUSED", match=f"accepts {KIND}"):
            await send(flow_to(stage, producer, "r"), b"", kind="vllm.kv")
        with pytest.raises(UnsupportedError):
            await step


async def test_ticket_cannot_be_an_output() -> None:
    async with ready_runtime(stage_config("prefill", function="prefill")) as runtime:
        with pytest.raises(UnsupportedError, match="is a ticket"):
            await events_of(runtime, step_spec(streamed=(STATE,)))


@pytest.mark.parametrize("able", [HandsOver(), HandsOver(offers=frozenset({"a.kv"}), accepts=frozenset({"c.kv"}))])
async def test_engine_that_lacks_a_kind_of_the_signature_does_not_start(able: HandsOver) -> None:
    signature = Signature(accepts={"in": TensorSpec.ticket("b.kv")}, emits={"out": Emitted(TensorSpec.ticket("a.kv"))})
    with raises(NotReadyError, reason="HANDOVER_UNAVAILABLE", match="engine x cannot"):
        check_handover(signature, EngineAbilities(hands_over=able), engine="x")
    both = HandsOver(offers=frozenset({"a.kv"}), accepts=frozenset({"b.kv"}))
    check_handover(signature, EngineAbilities(hands_over=both), engine="x")


async def test_tickets_that_the_stage_does_not_accept_are_dropped() -> None:
    offers = Offers()
    packet = Packet({}, {"step": 1}, {"kv": offers.offer(), "other": offers.offer()})
    assert set(accepted_part(packet, ACCEPTS, edge="a->b").tickets) == {"kv"}


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ({"kv": "other.kv"}, r"'kv' is handover\[other\.kv\]; expected handover\[test\.state\]"),
        ({"text": "test.state"}, "expected uint8"),
        ({"x": "test.state"}, "carries x; this stage accepts kv, text"),
    ],
)
async def test_ticket_of_another_type_is_rejected(names: dict[str, str], message: str) -> None:
    tickets = {name: Offers().offer(kind=kind) for name, kind in names.items()}
    with pytest.raises(InvalidChunkError, match=message):
        accepted_part(Packet({}, tickets=tickets), ACCEPTS, edge="a->b")


@pytest.mark.parametrize("kept", [0, 1, 2])
async def test_transform_passes_tickets(kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    class Repeats:
        def push(self, packet: Packet) -> list[Packet]:
            return [Packet(packet.tensors, {"copy": copy}) for copy in range(kept)]

    descriptor = TransformDescriptor(takes={}, gives={"text": TensorSpec("uint8", ("bytes",))}, factory="")
    monkeypatch.setattr(inputs, "load_descriptor", lambda *_: descriptor)
    monkeypatch.setattr(inputs, "import_factory", lambda _: lambda _: Repeats())
    transform = inputs.EdgeTransform("repeats", edge="a->b", model=None, user_errors=UserErrors())
    ticket = Offers().offer()
    made = transform.push(Packet({"text": np.zeros(1, np.uint8)}, tickets={"kv": ticket}))
    assert [dict(each.tickets) for each in made] == [{"kv": ticket}] + [{}] * max(0, kept - 1)


async def test_edge_selects_tickets_by_name() -> None:
    tickets = {name: Offers().offer(name) for name in ("with", "without")}
    binding = OutputBinding("a->b", ConsumerAddress("b-0", ""), GRPC, StepPolicy(), tensors=frozenset({"with", "text"}))
    selected = binding.select(Packet({"x": np.zeros(1)}, tickets=tickets))
    assert selected is not None
    assert (dict(selected.tensors), set(selected.tickets)) == ({}, {"with"})
    last = replace(binding, tensors=frozenset(), tokens="last")
    assert last.select(Packet({}, {"token_start": 0, "prompt_tokens": 3}, tickets)) is not None
