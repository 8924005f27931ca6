"""Sends random messages to every RPC of a running pipeline, and judges the answers."""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, TypeAlias

import grpc
from google.protobuf.descriptor import Descriptor, MethodDescriptor

from stagemesh.rpc.channels import CHANNEL_OPTIONS
from stagemesh.v1 import admin_pb2, control_pb2, media_pb2, membership_pb2, orchestrator_pb2, stage_pb2
from tests.fuzz.messages import MessageFuzzer

STOPPING = frozenset({"Shutdown", "Drain", "DrainReplicas", "RestartReplicas", "Sleep", "SetLogLevel"})
"""The RPCs that stop replicas or change their logs, as they should. They are not fuzzed."""
_SERVICES = {
    "OrchestratorService": orchestrator_pb2.DESCRIPTOR,
    "AdminService": admin_pb2.DESCRIPTOR,
    "MembershipService": membership_pb2.DESCRIPTOR,
    "MediaService": media_pb2.DESCRIPTOR,
    "StageService": stage_pb2.DESCRIPTOR,
    "StageControlService": control_pb2.DESCRIPTOR,
}
_CALL_S = 0.25
"""The time after which a call that still runs is cancelled, in seconds. Streams may run forever."""
_MAX_STREAMED = 6
_CALL_ENDED = "Internal error from Core"
"""The details if the server ends a call while the client sends. gRPC then hides the status."""
_Value: TypeAlias = Callable[[random.Random], object]


def _one_of(*values: object) -> _Value:
    return lambda rng: rng.choice(values)


LIKELY: Mapping[str, _Value] = {
    "stagemesh.v1.GenerateRequest.request_id": lambda rng: f"fuzz-{rng.getrandbits(32):x}",
    "stagemesh.v1.ExecuteStepRequest.request_id": lambda rng: f"fuzz-{rng.getrandbits(16):x}",
    "stagemesh.v1.ExecuteStepRequest.step_id": lambda rng: f"fuzz-{rng.getrandbits(16):x}/source/1",
    "stagemesh.v1.SessionOpen.session_id": lambda rng: f"fuzz-{rng.getrandbits(16):x}",
    "stagemesh.v1.EdgeKey.edge": _one_of("source->relay"),
    "stagemesh.v1.Hello.pipeline": _one_of("fuzzed"),
}


@dataclass
class Findings:
    """The answers to fuzzed messages."""

    sent: Counter[str] = field(default_factory=Counter[str])
    """The number of messages by the name of the RPC."""
    codes: Counter[str] = field(default_factory=Counter[str])
    defects: list[str] = field(default_factory=list[str])
    """The answers that only a defect explains: an exception that was not expected."""


def defects_in_log(log: str) -> list[str]:
    """Returns the records of unexpected exceptions in the log of a process, each with its first lines."""
    parts = log.split("Traceback (most recent call last)")
    return [f"{before[-300:]}{after[:1500]}" for before, after in pairwise(parts)]


def methods(service: str) -> Sequence[MethodDescriptor]:
    """Returns the RPCs of a service that are fuzzed."""
    found = _SERVICES[service].services_by_name[service].methods
    return [method for method in found if method.name not in STOPPING]


async def fuzz(endpoint: str, services: Sequence[str], *, messages: int, seed: int, at_once: int = 16) -> Findings:
    """Sends this number of messages to the RPCs of the services at `endpoint`, in turn."""
    findings, fuzzer = Findings(), MessageFuzzer(seed, fixed=LIKELY)
    rpcs = [method for service in services for method in methods(service)]
    async with grpc.aio.insecure_channel(endpoint, options=CHANNEL_OPTIONS) as channel:

        async def work(number: int) -> None:
            turn = number
            while findings.sent.total() < messages:
                await _call(channel, rpcs[turn % len(rpcs)], fuzzer, findings)
                turn += at_once

        await asyncio.gather(*(work(number) for number in range(at_once)))
    return findings


async def _call(channel: Any, method: MethodDescriptor, fuzzer: MessageFuzzer, findings: Findings) -> None:
    path = f"/{method.containing_service.full_name}/{method.name}"
    count = fuzzer.random.randint(1, _MAX_STREAMED) if method.client_streaming else 1
    sent = [fuzzer.data(method.input_type) for _ in range(count)]
    findings.sent[method.name] += count
    try:
        async with asyncio.timeout(_CALL_S):
            if method.client_streaming:
                await _drain(channel.stream_stream(path)(_each(sent)))
            else:
                await _drain(channel.unary_stream(path)(sent[0]))
        findings.codes["OK"] += 1
    except TimeoutError:
        findings.codes["still running"] += 1
    except grpc.aio.AioRpcError as exc:
        code, details = exc.code(), exc.details() or ""
        findings.codes[code.name] += 1
        is_defect = code is grpc.StatusCode.UNKNOWN or (code is grpc.StatusCode.INTERNAL and _CALL_ENDED not in details)
        if is_defect:
            shown = _shown(sent, method.input_type)
            findings.defects.append(f"{method.name}: {code.name} {details}\n{shown}")


async def _drain(call: Any) -> None:
    async for _ in call:
        pass


async def _each(messages: Sequence[bytes]) -> AsyncIterator[bytes]:
    for message in messages:
        yield message


def _shown(messages: Sequence[bytes], descriptor: Descriptor) -> str:
    return f"{descriptor.name}: {[message.hex() for message in messages]}"[:4000]
