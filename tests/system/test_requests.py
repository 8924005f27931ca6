"""Outputs, choices, parameters, cancellation, the reasons why outputs end, and errors of requests."""

import math
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

from stagemesh.client import Client, Event, Finished, OutputFinished, StageArguments, Text
from stagemesh.common.errors import CancelledRequestError, DeadlineError, InternalError, InvalidRequestError
from tests.deployment import eventually
from tests.local_mesh import LocalMesh, local_mesh
from tests.rpc.call_errors import raises
from tests.system.pipelines import pipeline_file, relays
from tests.system.reading import contents, letters

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
def writer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalMesh]:
    with local_mesh(pipeline_file(tmp_path_factory.mktemp("writer"), WRITER)) as up:
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
    assert result.finished.usage["source"].engine_steps == 3 * 10


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"prompt": ""}, InvalidRequestError, "prompt"),
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
    with writer.client() as client, pytest.raises(InternalError, match="fails at step 2") as caught:
        events.extend(client.generate("hi", outputs=["text", "broken"]))
    assert caught.value.metadata["stage"] == "broken"
    assert _ends(events)["broken"] == "failed"
    finished = events[-1]
    assert isinstance(finished, Finished)
    assert finished.stages["broken"].usage.engine_steps == 2


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
    assert (finished.stages["writer"].usage.engine_steps, finished.stages["slow"].usage.prompt_tokens) == (6, 0)
    assert 1 <= finished.stages["slow"].usage.engine_steps < 6


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


SCHEMA = '{"type": "object"}'
OMNI = """
pipeline: omni
main_stage: thinker
stages:
  thinker: {engine: fake, function: source, options: {steps: 6}}
  talker: {engine: fake, function: talk}
  frames: {engine: fake, function: frames}
edges:
  - {from: thinker, to: talker}
  - {from: talker, to: frames, chunk: {frames: 25, ramp: [5, 10]}}
outputs: {text: thinker, speech: talker, frames: frames}
"""


@pytest.fixture(scope="module")
def omni(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalMesh]:
    with local_mesh(pipeline_file(tmp_path_factory.mktemp("omni"), OMNI)) as up:
        yield up


@pytest.fixture
def client(omni: LocalMesh) -> Iterator[Client]:
    with omni.client() as client:
        yield client


def test_parameters_of_the_thinker_leave_the_talker_alone(client: Client) -> None:
    whole = client.generate("hello", seed=1).result()
    assert whole.texts["speech"] == whole.texts["text"]
    assert whole.texts["text"].count("Step") == 6
    limited = client.generate("hello", seed=1, max_tokens=2, json_schema=SCHEMA).result()
    # The talker repeats what it receives. Its own limits would shorten or replace it.
    assert limited.texts == {"text": SCHEMA * 2, "speech": SCHEMA * 2}
    stopped = client.generate("hello", seed=1, stop=["Step 3"]).result()
    assert stopped.texts["speech"] == stopped.texts["text"] == whole.texts["text"].partition("Step 3")[0]


def test_parameters_of_the_talker_leave_the_thinker_alone(client: Client) -> None:
    whole = client.generate("hello", seed=1).result().texts["text"]
    limited = client.generate("hello", seed=1, stages={"talker": {"max_tokens": 2}}).result()
    assert limited.texts == {"text": whole, "speech": whole[: whole.index("Step 2")]}
    stopped = client.generate("hello", seed=1, stages={"talker": {"stop": ["Step 1"]}}).result()
    assert stopped.texts == {"text": whole, "speech": whole[: whole.index("Step 1")]}
    structured = client.generate("hello", seed=1, stages={"talker": {"json_schema": SCHEMA}}).result()
    assert structured.texts == {"text": whole, "speech": SCHEMA * 6}


def test_a_request_sets_its_first_chunk(client: Client) -> None:
    arguments: dict[int | None, StageArguments] = {5: {}, 8: {"chunk": 8}, None: {"chunk": "whole"}}
    frames: dict[int | None, bytes] = {}
    for first, given in arguments.items():
        result = client.generate("hello", seed=1, outputs=["speech", "frames"], stages={"frames": given}).result()
        frames[first] = b"".join(output.tensor.tobytes() for output in result.tensors["frames"])
        rows = len(result.texts["speech"].encode())
        ramp = () if first is None else (first, 10)
        (chunks,) = (edge.chunks for edge in result.finished.edges if edge.edge == "talker->frames")
        assert chunks == (len(ramp) + math.ceil((rows - sum(ramp)) / 25) if ramp else 1)
    assert len(set(frames.values())) == 1
    with raises(InvalidRequestError, reason="INVALID_INITIAL_FRAMES", match="use 5 to 25"):
        client.generate("hello", stages={"frames": {"chunk": 26}}).result()
    with pytest.raises(InvalidRequestError, match="chunk is 'most'; give the number of frames of the first chunk"):
        client.generate("hello", stages={"frames": {"chunk": "most"}})  # type: ignore[typeddict-item]
