"""A program that knows no .proto files calls an orchestrator by reflection, as grpcurl does."""

from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from google.protobuf import json_format
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from tests.deployment import Deployment, deployed
from tests.system.pipelines import relays

SERVICE = "stagemesh.v1.OrchestratorService"


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with deployed(relays(tmp_path_factory.mktemp("relays"), steps=3, size_bytes=0)) as up:
        yield up


@pytest.fixture
def channel(up: Deployment) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(up.endpoint) as channel:
        yield channel


def call(channel: grpc.Channel, name: str, **request: Any) -> Iterator[dict[str, Any]]:
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
    (description,) = call(channel, "DescribePipeline")
    assert description["pipeline"] == "relays"
    events = list(call(channel, "Generate", input={"text": "Hello"}, outputs=["text"]))
    assert [event for event in events if "finished" in event] == events[-1:]
    parts = [event["output"].get("text", "") for event in events if "output" in event]
    assert "Step 2 is" in "".join(parts)
