"""Every RPC with random messages, against real processes. `make fuzz` sends 100,000."""

import os
import time
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from google.protobuf.descriptor import FieldDescriptor, MethodDescriptor

from stagemesh.rpc.channels import CHANNEL_OPTIONS
from tests.deployment import Deployment, deployed_for_module
from tests.fuzz.rpcs import defects_in_log, fuzz, methods
from tests.rpc.call_errors import error_of
from tests.rpc.test_message_limits import paths_of, within
from tests.system.pipelines import pipeline_file

MESSAGES = int(os.environ.get("STAGEMESH_FUZZ_MESSAGES", "1500"))
"""The number of messages to each of the two kinds of processes."""
SEED = int(os.environ.get("STAGEMESH_FUZZ_SEED", "1"))
GROWTH_MB = 48
_ANSWER_S = 2.0
PIPELINE = """\
pipeline: fuzzed
stages:
  source: {engine: fake, function: source, options: {steps: 3}}
  relay: {engine: fake, function: relay}
edges: [{from: source, to: relay}]
outputs: {text: relay}
"""

pytestmark = pytest.mark.timeout(60 + MESSAGES // 20)


running = deployed_for_module(lambda folder: pipeline_file(folder, PIPELINE))


def _defects(running: Deployment) -> dict[str, list[str]]:
    """Returns the unexpected exceptions in the logs, by process."""
    logs = Path(next(each["logs"] for each in running.history if each.get("event") == "ready"))
    found = {path.stem: defects_in_log(path.read_text()) for path in logs.glob("*.log")}
    return {name: defects[:2] for name, defects in found.items() if defects}


def _memory_mb(running: Deployment) -> dict[str, float]:
    return {name: psutil.Process(running.process_id(name)).memory_info().rss / 1e6 for name in running.statuses}


async def _fuzz(endpoint: str, *services: str, running: Deployment) -> None:
    await fuzz(endpoint, services, messages=300, seed=SEED + 1000)
    before_mb, processes = _memory_mb(running), {name: running.process_id(name) for name in running.statuses}
    findings = await fuzz(endpoint, services, messages=MESSAGES, seed=SEED)
    print(dict(findings.codes))
    assert not findings.defects, "\n".join(findings.defects[:5])
    # Some messages are valid, and some are not.
    assert findings.codes.keys() >= {"OK", "INVALID_ARGUMENT"}, findings.codes
    assert not _defects(running)
    assert {name: running.process_id(name) for name in running.statuses} == processes, "a process has ended"
    growth_mb = {name: after - before_mb[name] for name, after in _memory_mb(running).items()}
    assert max(growth_mb.values()) < GROWTH_MB, growth_mb
    with running.client() as client:
        assert client.generate("hello", seed=1).result().text == client.generate("hello", seed=1).result().text != ""


async def _reason_of(endpoint: str, method: MethodDescriptor, data: bytes) -> str:
    options = list((dict(CHANNEL_OPTIONS) | {"grpc.max_send_message_length": -1}).items())
    async with grpc.aio.insecure_channel(endpoint, options=options) as channel:
        make_call: Any = channel.stream_stream if method.client_streaming else channel.unary_stream
        call = make_call(f"/{method.containing_service.full_name}/{method.name}")
        return (await error_of(call(iter([data]) if method.client_streaming else data, timeout=20))).reason


@pytest.mark.parametrize("repeated", ["unknown", "first"])
async def test_no_rpc_parses_a_message_of_millions_of_elements(running: Deployment, repeated: str) -> None:
    stage = running.endpoint_of("relay-0")
    endpoints = {
        "OrchestratorService": running.endpoint,
        "AdminService": running.admin_endpoint,
        "StageService": stage,
        "StageControlService": stage,
    }
    for service, endpoint in endpoints.items():
        for method in methods(service):
            # The first field of a message without fields is unknown, too.
            data = (b"\xfa\x01\0" if repeated == "unknown" else b"\x0a\0") * 1_000_000
            assert await _reason_of(endpoint, method, data) == "MESSAGE_TOO_LARGE", method.full_name
            began_s = time.monotonic()
            assert await _reason_of(endpoint, method, b"\xff") == "MALFORMED_MESSAGE", method.full_name
            assert time.monotonic() - began_s < _ANSWER_S


async def test_every_rpc_names_the_defect_of_a_message(running: Deployment) -> None:
    stage = running.endpoint_of("relay-0")
    services = {"OrchestratorService": running.endpoint, "AdminService": running.admin_endpoint}
    services |= {"StageService": stage, "StageControlService": stage}
    for service, endpoint in services.items():
        for method in methods(service):
            assert await _reason_of(endpoint, method, bytes(9 << 20)) == "MESSAGE_TOO_LARGE", method.full_name
            texts = (path for path in paths_of(method.input_type) if path[-1].type == FieldDescriptor.TYPE_STRING)
            if (path := next(texts, None)) is not None:
                damaged = within(path, b"\xff")
                assert await _reason_of(endpoint, method, damaged) == "MALFORMED_MESSAGE", method.full_name


async def test_rpcs_for_clients_survive_any_message(running: Deployment) -> None:
    await _fuzz(running.endpoint, "OrchestratorService", running=running)


async def test_rpcs_for_operators_and_registration_survive_any_message(running: Deployment) -> None:
    await _fuzz(running.admin_endpoint, "AdminService", "MembershipService", running=running)


async def test_rpcs_of_stages_survive_any_message(running: Deployment) -> None:
    await _fuzz(running.endpoint_of("relay-0"), "StageService", "StageControlService", running=running)
