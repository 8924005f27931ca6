"""Clients, orchestrators and stages of a later version of the contract: added fields, kinds and enum values."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from stagemesh.client.clients import AsyncClient
from stagemesh.common.errors import CancelledRequestError, NotReadyError, UnsupportedError
from stagemesh.orchestrator.request.lifecycle import fingerprint
from stagemesh.orchestrator.request.validation import validate
from stagemesh.pipeline import Pipeline
from stagemesh.v1 import chunk_pb2, orchestrator_pb2, request_pb2, stage_pb2
from stagemesh.v1.protocol_pb2 import Protocol
from tests.client.conftest import orchestrator as orchestrator  # noqa: PLC0414 - a fixture
from tests.client.scripted import ScriptedOrchestrator
from tests.later_contract import LATER, later, later_class, today
from tests.orchestrator.mesh import CHAIN, Mesh, ask, mesh, texts
from tests.orchestrator.scripted_stage import Response, Script, ScriptedStage, hang, say_hello
from tests.rpc.call_errors import error_of, raises

Event = orchestrator_pb2.GenerateResponse
EVENTS: list[Event] = [
    Event(admitted={"request_id": "r", "seed": 7, "choices": [{"replicas": {"a": "a-0"}}]}),  # type: ignore[arg-type]
    Event(output=request_pb2.Output(name="text", text="hello")),
    Event(finished={"choices": [{"stages": {"a": {}}}]}),  # type: ignore[arg-type]
]


def _described(**fields: Any) -> orchestrator_pb2.DescribePipelineResponse:
    protocol = Protocol(lowest_version=1, highest_version=2, features=["later"], software="stagemesh 9")
    return orchestrator_pb2.DescribePipelineResponse(**{"protocol": protocol, **fields})


# -- today's client, later orchestrator


async def test_a_client_ignores_added_fields_and_ignorable_events(orchestrator: ScriptedOrchestrator) -> None:
    ignored = later_class("GenerateResponse")(later="news", ignorable=True)
    orchestrator.scripts.append([today(each, Event) for each in (ignored, *map(later, EVENTS), ignored)])
    async with AsyncClient(orchestrator.endpoint) as client:
        result = await client.generate("hi", request_id="r").result()
    assert (result.text, result.seed) == ("hello", 7)


_LATER_EVENTS: dict[str, tuple[Any, str]] = {
    "event": (later_class("GenerateResponse")(later="news"), "GenerateResponse"),
    "output": (later_class("GenerateResponse")(output=later_class("Output")(name="text", later="news")), "Output"),
}


@pytest.mark.parametrize(("event", "name"), _LATER_EVENTS.values(), ids=_LATER_EVENTS)
async def test_a_client_refuses_an_unknown_kind(orchestrator: ScriptedOrchestrator, event: Any, name: str) -> None:
    orchestrator.scripts.append([*EVENTS[:2], today(event, Event), EVENTS[2]])
    async with AsyncClient(orchestrator.endpoint) as client:
        with raises(UnsupportedError, reason="UNKNOWN_KIND", match=rf"sent a {name} of an unknown kind \(field 1000"):
            await client.generate("hi", request_id="r").result()
    assert [request.request_id for request in orchestrator.cancels] == ["r"]


async def test_a_client_describes_a_later_orchestrator(orchestrator: ScriptedOrchestrator) -> None:
    replica: Any = orchestrator_pb2.ReplicaStatus(name="a-0", state=LATER)  # type: ignore[arg-type]
    stage = orchestrator_pb2.StageDescription(name="a", replicas=[replica])
    orchestrator.description = today(later(_described(stages=[stage])), orchestrator_pb2.DescribePipelineResponse)
    async with AsyncClient(orchestrator.endpoint) as client:
        described = await client.describe()
    assert described.stages[0].replicas[0].state == LATER
    assert list(described.protocol.features) == ["later"]


async def test_a_client_refuses_an_orchestrator_without_a_common_version(orchestrator: ScriptedOrchestrator) -> None:
    orchestrator.description = _described(protocol=Protocol(lowest_version=2, highest_version=2))
    async with AsyncClient(orchestrator.endpoint) as client:
        with pytest.raises(NotReadyError, match=r"speaks wire versions 2 to 2, but this client speaks .* upgrade this"):
            await client.describe()


# -- later client, today's orchestrator


async def test_an_orchestrator_serves_a_later_client(chain: Mesh) -> None:
    generate: Any = chain.channel.unary_stream(
        "/stagemesh.v1.OrchestratorService/Generate",
        later_class("GenerateRequest").SerializeToString,
        later_class("GenerateResponse").FromString,
    )
    request = later(ask(request_id="r", parameters=request_pb2.Parameters(sampling=request_pb2.Sampling())))
    events = [today(event, Event) async for event in generate(request, timeout=20)]
    assert texts(events, "last") == "c done"


async def test_an_orchestrator_refuses_a_client_without_a_common_version(tmp_path: Path) -> None:
    async with mesh(tmp_path, ready=False) as chain:
        request = orchestrator_pb2.DescribePipelineRequest(protocol=Protocol(lowest_version=2, highest_version=2))
        error = await error_of(chain.stub.DescribePipeline(request, timeout=10))
    assert "the client speaks wire versions 2 to 2, but this orchestrator" in error.message


def _asking(**fields: Any) -> Any:
    """Returns a later client's request."""
    return later_class("GenerateRequest")(**{"request_id": "r", "input": {"text": "hello"}, **fields})


def _saying_part(**content: Any) -> Any:
    part = later_class("Part")(**content)
    message = later_class("Message")(role=request_pb2.ROLE_USER, parts=[part])
    return later_class("Input")(conversation=later_class("Conversation")(messages=[message]))


_WITHOUT_EFFECT: dict[str, tuple[Any, str]] = {
    "prompt": (_asking(input=later_class("Input")(later="song")), "Input"),
    "part": (_asking(input=_saying_part(later="song")), "Part"),
    "file": (_asking(input=_saying_part(image=later_class("MediaFile")(later="song"))), "MediaFile"),
    "parameter": (_asking(parameters=later_class("Parameters")(later_note="x")), "Parameters"),
    "structure": (_asking(parameters=later_class("Parameters")(sampling={"later": "x"})), "Sampling"),
    "sampling": (_asking(parameters=later_class("Parameters")(sampling={"later_note": "x"})), "Sampling"),
    "option": (_asking(parameters=later_class("Parameters")(options={"speed": {"later": "x"}})), "TypedValue"),
    "stage": (_asking(parameters=later_class("Parameters")(stages={"a": {"later_note": "x"}})), "StageParameters"),
}


@pytest.mark.parametrize(("request_", "name"), _WITHOUT_EFFECT.values(), ids=_WITHOUT_EFFECT)
def test_an_orchestrator_refuses_what_would_have_no_effect(pipeline: Pipeline, request_: Any, name: str) -> None:
    with raises(UnsupportedError, reason="UNKNOWN_KIND") as caught:
        validate(today(request_, orchestrator_pb2.GenerateRequest), pipeline)
    assert caught.value.metadata["message"] == name


def test_a_field_that_is_not_known_does_not_make_another_request() -> None:
    request = ask(request_id="r")
    request_of_later = today(later(request), orchestrator_pb2.GenerateRequest)
    assert fingerprint(request_of_later) == fingerprint(request)


# -- later stage, today's orchestrator


def _saying(event: Any) -> Script:
    async def script(stage: ScriptedStage, request: stage_pb2.ExecuteStepRequest) -> AsyncIterator[Response]:
        async for response in say_hello(stage, request):
            yield today(later(response), Response)
            if response.HasField("accepted"):
                yield today(event, Response)

    return script


@pytest.mark.parametrize("minimal", [(), ("b",)], ids=["stream", "calls"])
async def test_an_orchestrator_ignores_added_fields_and_ignorable_events(tmp_path: Path, minimal: Any) -> None:
    script = _saying(later_class("ExecuteStepResponse")(later="news", ignorable=True))
    async with mesh(tmp_path, scripts={"b": script}, minimal=minimal) as chain:
        chain.stages["b"].description = today(later(chain.stages["b"].description), stage_pb2.DescribeResponse)
        events = await chain.generate()
    assert texts(events, "last") == "c done"


async def test_an_orchestrator_refuses_an_unknown_event(tmp_path: Path) -> None:
    script = _saying(later_class("ExecuteStepResponse")(later="news"))
    async with mesh(tmp_path, scripts={"b": script}) as chain:
        error = await chain.failure()
        assert (error.reason, error.metadata["stage"]) == ("UNKNOWN_KIND", "b")
        await chain.until_idle()


# -- a stage that serves the minimum profile


async def test_a_pipeline_runs_over_a_stage_of_the_minimum_profile(tmp_path: Path) -> None:
    async with mesh(tmp_path, minimal=["b"]) as chain:
        events = await chain.generate()
        edges = {edge.name: edge for edge in (await chain.describe()).edges}
    assert texts(events, "last") == "c done"
    assert edges["b->c"].links[0].connector == chunk_pb2.CONNECTOR_GRPC


async def test_a_stage_of_the_minimum_profile_cannot_use_another_connector(tmp_path: Path) -> None:
    fixed = CHAIN.replace("{from: b, to: c}", "{from: b, to: c, connector: shm}")
    async with mesh(tmp_path, fixed, minimal=["b"], ready=False) as chain:
        while not (link := (await chain.describe()).edges[1].links) or not link[0].HasField("error"):
            pass
        assert (await chain.failure()).reason == "CONNECTOR_UNAVAILABLE"


async def test_a_request_over_a_stage_of_the_minimum_profile_is_cancelled(tmp_path: Path) -> None:
    async with mesh(tmp_path, scripts={"b": hang}, minimal=["b"]) as chain:
        failing = asyncio.create_task(chain.failure(request_id="r"))
        await chain.stages["b"].started.wait()
        await chain.cancel("r")
        assert isinstance(await failing, CancelledRequestError)
        await chain.until_idle()
