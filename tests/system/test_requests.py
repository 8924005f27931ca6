"""Outputs, choices, limits, cancellation, the reasons why outputs end, and errors of requests."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import json_format
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from stagemesh.client import AsyncClient, Client, Event, Finished, OutputFinished, RetryPolicy, Text
from stagemesh.common.errors import (
    CancelledRequestError,
    DeadlineError,
    ExistsError,
    InternalError,
    InvalidRequestError,
    OverloadedError,
)
from tests.deployment import eventually
from tests.local_mesh import LocalMesh, local_mesh
from tests.system.pipelines import relays
from tests.system.reading import contents, letters

STEPS, STEP_S = 500, 0.02
"""A request that takes ten seconds."""
SERVICE = "stagemesh.v1.OrchestratorService"
WRITER = """
pipeline: writer
stages:
  writer: {engine: fake, function: source, options: {steps: 6}}
  slow: {engine: fake, function: relay, options: {step_s: 0.1}, when: {output: slow}}
  broken: {engine: fake, function: relay, options: {fail_at_step: 2}, when: {output: broken}}
edges: [{from: writer, to: slow}, {from: writer, to: broken}]
outputs: {text: writer, slow: slow, broken: broken}
"""


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalMesh]:
    with local_mesh(relays(tmp_path_factory.mktemp("quick"), step_s=0.01)) as up:
        yield up
        eventually(up.idle, timeout_s=10)


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalMesh]:
    pipeline = relays(tmp_path_factory.mktemp("slow"), steps=STEPS, step_s=STEP_S, max_in_flight=2, max_queued=0)
    with local_mesh(pipeline) as up:
        yield up


@pytest.fixture(scope="module")
def writer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalMesh]:
    path = tmp_path_factory.mktemp("writer") / "writer.yaml"
    path.write_text(WRITER)
    with local_mesh(path) as up:
        yield up
        eventually(up.idle, timeout_s=10)


@pytest.mark.parametrize("connector", ["shm", "grpc"])
def test_outputs_agree_over_every_connector(tmp_path: Path, connector: str) -> None:
    with local_mesh(relays(tmp_path, connector=connector)) as up, up.client() as client:
        result = client.generate("hello", seed=1).result()
        assert letters(result) == result.text.encode()
        assert result.text.startswith("Step 0 is ")
        assert len(result.text) == 200_000
        assert {edge.connector for edge in result.finished.edges} == {connector}
        eventually(up.idle, timeout_s=10)


def test_eight_requests_at_once_never_mix(quick: LocalMesh) -> None:
    with quick.client() as client, ThreadPoolExecutor(8) as pool:
        prompts = [f"prompt {n}" for n in range(8)]
        alone = {prompt: client.generate(prompt, seed=5).result().text for prompt in prompts}
        results = dict(zip(prompts, pool.map(lambda p: client.generate(p, seed=5).result(), prompts), strict=True))
        assert len(set(alone.values())) == 8
        for prompt, result in results.items():
            assert result.text == alone[prompt]
            assert letters(result) == alone[prompt].encode()


def test_choices_equal_requests_with_their_seeds(quick: LocalMesh) -> None:
    seeds = [2**63 - 2, 2**63 - 1, 0]
    with quick.client() as client:
        result = client.generate("hello", seed=seeds[0], choices=3).result()
        apart = [contents(client.generate("hello", seed=seed).result()) for seed in seeds]
    assert list(map(contents, result.choices)) == apart
    assert len({text for text, _ in apart}) == 3
    assert [choice.seed for choice in result.choices] == seeds
    assert result.finished.usage["source"].steps == 3 * 10


def test_a_client_that_disconnects_stops_every_stage(slow: LocalMesh) -> None:
    with slow.client() as client:
        for event in client.generate("hello"):
            if isinstance(event, Text):
                break
        eventually(slow.idle, timeout_s=10)


def test_cancelled_request_stops_every_stage(slow: LocalMesh) -> None:
    with slow.client() as client, ThreadPoolExecutor(1) as pool:
        running = pool.submit(client.generate("hello", request_id="r1").result)
        eventually(lambda: slow.load("frames-0").running == 1, timeout_s=20)
        client.cancel("r1")
        with pytest.raises(CancelledRequestError):
            running.result()
        eventually(slow.idle, timeout_s=10)


def test_a_request_beyond_the_limit_is_rejected_with_a_time_to_retry(slow: LocalMesh) -> None:
    with Client(slow.endpoint, retry_policy=RetryPolicy(attempts=1)) as client, ThreadPoolExecutor(2) as pool:
        running = [pool.submit(client.generate("hello", request_id=f"limit{n}").result) for n in range(2)]
        eventually(lambda: slow.load("frames-0").running == 2, timeout_s=20)
        with pytest.raises(OverloadedError) as caught:
            client.generate("one too many").result()
        assert caught.value.retry_after_s is not None
        for n, future in enumerate(running):
            client.cancel(f"limit{n}")
            assert isinstance(future.exception(), CancelledRequestError)


def test_failing_stage_ends_the_request_with_its_cause(tmp_path: Path) -> None:
    with local_mesh(relays(tmp_path, fail=", options: {fail_at_step: 3}")) as up, up.client() as client:
        with pytest.raises(InternalError, match="fails at step 3") as caught:
            client.generate("hello").result()
        assert caught.value.metadata["stage"] == "frames"
        eventually(up.idle, timeout_s=10)


async def test_the_same_request_attaches_and_another_is_rejected(quick: LocalMesh) -> None:
    async with AsyncClient(quick.endpoint) as client:
        first = aiter(client.generate("hello", request_id="twice", seed=1, max_tokens=50))
        await anext(first)
        second = await client.generate("hello", request_id="twice", seed=1, max_tokens=50).result()
        with pytest.raises(ExistsError):
            await client.generate("other", request_id="twice", seed=1).result()
        rest = [event.delta async for event in first if isinstance(event, Text)]
        assert "".join(rest) == second.text


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"prompt": ""}, InvalidRequestError, "prompt"),
        ({"prompt": "x", "outputs": ["video"]}, InvalidRequestError, "video"),
        ({"prompt": "x", "options": {"speed": 2.0}}, InvalidRequestError, "speed"),
        ({"prompt": "x", "request_id": "a b"}, InvalidRequestError, "request_id"),
        ({"prompt": "x", "timeout_s": 0.0}, DeadlineError, "timeout_s"),
        ({"prompt": "x" * (9 << 20)}, InvalidRequestError, "bytes"),
    ],
)
def test_errors_of_bad_requests_name_the_remedy(
    quick: LocalMesh, arguments: dict[str, object], error: type[Exception], message: str
) -> None:
    with quick.client() as client, pytest.raises(error, match=message):
        client.generate(**arguments).result()  # type: ignore[arg-type]


# -- why outputs end


def _ends(events: list[Event]) -> dict[str, str]:
    return {event.output: event.reason for event in events if isinstance(event, OutputFinished)}


def test_an_output_says_why_it_ends(writer: LocalMesh) -> None:
    with writer.client() as client:
        finishes = [
            client.generate("hi", outputs=["text"], **arguments).result().finishes["text"]
            for arguments in ({}, {"max_tokens": 2}, {"stop": ["never", "Step 2"]})
        ]
    assert finishes == [
        OutputFinished("text", "end"),
        OutputFinished("text", "length"),
        OutputFinished("text", "stop", stop_text="Step 2"),
    ]


def test_a_failed_request_reports_its_work(writer: LocalMesh) -> None:
    events: list[Event] = []
    with writer.client() as client, pytest.raises(InternalError, match="fails at step 2"):
        events.extend(client.generate("hi", outputs=["text", "broken"]))
    assert _ends(events)["broken"] == "failed"
    finished = events[-1]
    assert isinstance(finished, Finished)
    assert finished.stages["broken"].usage.steps == 2


def test_a_cancelled_request_reports_its_work(writer: LocalMesh) -> None:
    events: list[Event] = []
    with writer.client() as client, pytest.raises(CancelledRequestError):
        for event in client.generate("hi", outputs=["text", "slow"], request_id="mine"):
            events.append(event)
            if isinstance(event, Text) and event.output == "slow":
                client.cancel("mine")
    assert _ends(events) == {"text": "end", "slow": "cancelled"}
    finished = events[-1]
    assert isinstance(finished, Finished)
    assert (finished.stages["writer"].usage.steps, finished.stages["slow"].usage.prompt_tokens) == (6, 0)
    assert 1 <= finished.stages["slow"].usage.steps < 6


# -- a program that knows no .proto files, such as grpcurl


@pytest.fixture
def channel(quick: LocalMesh) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(quick.endpoint) as channel:
        yield channel


def _call(channel: grpc.Channel, name: str, **request: Any) -> Iterator[dict[str, Any]]:
    """Calls a method with a request as JSON, and yields the responses as JSON. Knows only what the server reflects."""
    pool = DescriptorPool(ProtoReflectionDescriptorDatabase(channel))
    method = pool.FindServiceByName(SERVICE).methods_by_name[name]
    answers: Any = channel.unary_stream(
        f"/{SERVICE}/{name}",
        request_serializer=lambda message: message.SerializeToString(),
        response_deserializer=GetMessageClass(method.output_type).FromString,
    )
    message = json_format.ParseDict(request, GetMessageClass(method.input_type)())
    for answer in answers(message, timeout=30):
        yield json_format.MessageToDict(answer)


def test_the_services_of_an_orchestrator_are_listed(channel: grpc.Channel) -> None:
    services = set(ProtoReflectionDescriptorDatabase(channel).get_services())
    assert {SERVICE, "grpc.health.v1.Health"} <= services


def test_the_commands_of_the_documents_work_by_reflection(channel: grpc.Channel) -> None:
    (description,) = _call(channel, "DescribePipeline")
    assert description["pipeline"] == "relays"
    events = list(_call(channel, "Generate", input={"text": "Hello"}, outputs=["text"]))
    assert [event for event in events if "finished" in event] == events[-1:]
    parts = [event["output"].get("text", "") for event in events if "output" in event]
    assert "Step 2 is" in "".join(parts)
