"""Reads the events of a request, and acts at certain moments of it."""

from collections.abc import Callable, Iterable, Mapping

import grpc

from stagemesh.client import Choice, Event, Result, Text
from stagemesh.client.responses import ResultBuilder
from stagemesh.rpc.channels import CHANNEL_OPTIONS
from stagemesh.v1 import admin_pb2, admin_pb2_grpc
from tests.deployment import Replicas


def read(events: Iterable[Event], at: Mapping[int, Callable[[], object]]) -> Result:
    """Reads the events of a request, and calls each function when its number of texts has arrived."""
    builder, texts, left = ResultBuilder(), 0, dict(at)
    for event in events:
        builder.add(event)
        if isinstance(event, Text):
            texts += 1
            if (act := left.pop(texts, None)) is not None:
                act()
    assert not left, "something was not done"
    return builder.build()


def contents(choice: Choice) -> tuple[str, bytes]:
    """Returns the text and the frames of a choice."""
    return choice.text, b"".join(output.tensor.tobytes() for output in choice.tensors["frames"])


def letters(result: Result) -> bytes:
    """Returns the text from which the stage `frames` has made its frames, one of each byte."""
    return b"".join(output.tensor[:, 0].astype("u1").tobytes() for output in result.tensors["frames"])


def steps_of(up: Replicas, request_id: str) -> list[admin_pb2.StepStatus]:
    """Returns the attempts with which the orchestrator ran a request."""
    with grpc.insecure_channel(up.admin_endpoint, options=CHANNEL_OPTIONS) as channel:
        request = admin_pb2.GetRequestRequest(request_id=request_id)
        answer = admin_pb2_grpc.AdminServiceStub(channel).GetRequest(request, timeout=10, wait_for_ready=True)
    return list(answer.steps)
