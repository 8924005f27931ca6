"""The adapters of whole stages: loaded by one call, part of placement, and restored after restarts."""

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from stagemesh.common.errors import InvalidRequestError, NotFoundError, NotReadyError, StagemeshError
from stagemesh.v1 import admin_pb2, admin_pb2_grpc, control_pb2, orchestrator_pb2
from stagemesh.v1.control_pb2_grpc import StageControlServiceStub
from tests.cli.commands import stagemesh
from tests.orchestrator.mesh import Mesh, mesh, poll
from tests.rpc.call_errors import error_of

_PIPELINE = """
pipeline: adapted
stages:
  a: {{engine: vllm, model: {model}, options: {{enable_lora: true}}}}
  b: {{engine: fake, function: relay}}
edges: [{{from: a, to: b}}]
outputs: {{last: b}}
"""


@pytest.fixture
async def adapted(tmp_path: Path) -> AsyncIterator[Mesh]:
    """Yields a pipeline with two replicas of each stage. Stage a accepts adapters."""
    async with mesh(tmp_path, _PIPELINE.format(model=tmp_path), replicas=2) as adapted:
        yield adapted


INVALID = InvalidRequestError("no such folder", reason="INVALID_ADAPTER")


def _fail(mesh: Mesh, error: StagemeshError | None, *replicas: str) -> None:
    """Makes later calls for adapters of these replicas fail, or succeed."""
    for name in replicas:
        mesh.stages[name].controls.adapter_error = error


async def _load(mesh: Mesh, name: str = "x", path: str = "/x") -> dict[str, str]:
    """Loads an adapter on stage a. Returns the reason of the error of each replica, or an empty text."""
    request = admin_pb2.AdminServiceLoadAdapterRequest(stage="a", name=name, path=path)
    answer = await admin_pb2_grpc.AdminServiceStub(mesh.admin).LoadAdapter(request, timeout=10)
    return {each.replica: each.error.reason for each in answer.replicas}


async def _unload(mesh: Mesh, name: str = "x") -> dict[str, str]:
    request = admin_pb2.AdminServiceUnloadAdapterRequest(stage="a", name=name)
    answer = await admin_pb2_grpc.AdminServiceStub(mesh.admin).UnloadAdapter(request, timeout=10)
    return {each.replica: each.error.reason for each in answer.replicas}


async def _list(mesh: Mesh) -> dict[str, tuple[bool, list[str]]]:
    """Returns whether each adapter is remembered, and the replicas that have it."""
    request = admin_pb2.AdminServiceListAdaptersRequest(stage="a")
    answer = await admin_pb2_grpc.AdminServiceStub(mesh.admin).ListAdapters(request, timeout=10)
    return {each.name: (each.persistent, [one.replica for one in each.replicas]) for each in answer.adapters}


async def _generate(mesh: Mesh, adapter: str = "x") -> str:
    """Runs a request with an adapter, and returns the replica of stage a."""
    events = await mesh.generate(parameters={"adapter": adapter})
    (admitted,) = (event.admitted for event in events if event.HasField("admitted"))
    return admitted.choices[0].replicas["a"]


async def _replica(mesh: Mesh, name: str) -> orchestrator_pb2.ReplicaStatus:
    return next(replica for replica in await mesh.list_replicas(stage="a") if replica.name == name)


async def _until_reported(mesh: Mesh, replica: str, *adapters: str) -> None:
    """Waits until the orchestrator knows these adapters of a replica."""
    await poll(lambda: _replica(mesh, replica), until=lambda seen: list(seen.load.adapters) == list(adapters))


async def _until_remembered(mesh: Mesh, *adapters: str) -> None:
    """Waits until the orchestrator remembers these adapters alone."""
    await poll(
        lambda: _list(mesh), until=lambda seen: [name for name, (kept, _) in seen.items() if kept] == [*adapters]
    )


async def _restart(mesh: Mesh, name: str) -> None:
    """Replaces the first replica of a stage by a new process without adapters."""
    stage, server = mesh.stages[name], mesh.servers[name]
    # Otherwise the ended process would seem to have unloaded its adapters.
    stage.tells_load = False
    stage.description.incarnation = "second"
    stage.controls.adapters.clear()
    server.set_health("", serving=False)
    await poll(lambda: _replica(mesh, f"{name}-0"), until=lambda seen: seen.incarnation == "second")
    stage.tells_load = True
    server.set_health("", serving=True)


async def test_an_adapter_is_loaded_on_all_replicas_of_a_stage(adapted: Mesh) -> None:
    assert await _load(adapted) == {"a-0": "", "a-1": ""}
    assert await _list(adapted) == {"x": (True, ["a-0", "a-1"])}
    assert await _generate(adapted) in ("a-0", "a-1")
    assert await _unload(adapted) == {"a-0": "", "a-1": ""}
    assert await _list(adapted) == {}


async def test_a_replica_that_fails_is_named_and_gets_no_requests_with_the_adapter(adapted: Mesh) -> None:
    _fail(adapted, INVALID, "a-1")
    assert await _load(adapted) == {"a-0": "", "a-1": "INVALID_ADAPTER"}
    assert await _list(adapted) == {"x": (True, ["a-0"])}
    assert {await _generate(adapted) for _ in range(10)} == {"a-0"}
    _fail(adapted, None, "a-1")
    assert await _load(adapted) == {"a-0": "", "a-1": ""}, "a repeated call loads the rest"


async def test_an_adapter_that_no_replica_loads_is_not_remembered(adapted: Mesh) -> None:
    _fail(adapted, INVALID, "a", "a-1")
    assert (await error_of(_load(adapted))).reason == "INVALID_ADAPTER"
    assert await _list(adapted) == {}


async def test_a_request_with_an_unknown_adapter_fails_before_a_step_is_sent(adapted: Mesh) -> None:
    await _load(adapted, "known")
    for replica in ("a-0", "a-1"):
        await _until_reported(adapted, replica, "known")
    error = await adapted.failure(parameters={"adapter": "x"})
    assert (type(error), error.reason) == (NotFoundError, "UNKNOWN_ADAPTER")
    assert "loaded: known" in error.message
    assert not any(stage.requests for stage in adapted.stages.values())


async def test_an_adapter_returns_after_a_restart_before_requests_that_need_it(adapted: Mesh) -> None:
    _fail(adapted, INVALID, "a-1")
    await _load(adapted)
    await _until_reported(adapted, "a-0", "x")
    await _restart(adapted, "a")
    assert await _generate(adapted) == "a-0"
    assert adapted.stages["a"].controls.adapters["x"].path == "/x"


async def test_an_unloaded_adapter_does_not_return_after_a_restart(adapted: Mesh) -> None:
    await _load(adapted)
    await _load(adapted, "y")
    await _unload(adapted)
    await _restart(adapted, "a")
    await _until_reported(adapted, "a-0", "y")
    assert list(adapted.stages["a"].controls.adapters) == ["y"]


async def test_an_adapter_that_another_orchestrator_loaded_is_restored(adapted: Mesh) -> None:
    for name in ("a", "a-1"):
        adapted.stages[name].controls.adapters["x"] = control_pb2.Adapter(name="x", path="/x")
    await _until_remembered(adapted, "x")
    await _restart(adapted, "a")
    await _until_reported(adapted, "a-0", "x")
    assert adapted.stages["a"].controls.adapters["x"].path == "/x"


async def test_an_adapter_that_another_orchestrator_unloaded_does_not_return(adapted: Mesh) -> None:
    await _load(adapted)
    await _until_reported(adapted, "a-0", "x")
    await _until_reported(adapted, "a-1", "x")
    for name in ("a", "a-1"):
        adapted.stages[name].controls.adapters.clear()
    await _until_remembered(adapted)
    await _restart(adapted, "a")
    await _load(adapted, "y")
    await _until_reported(adapted, "a-0", "y")
    assert list(adapted.stages["a"].controls.adapters) == ["y"]


async def test_an_adapter_in_use_stays_loaded_and_remembered(adapted: Mesh) -> None:
    await _load(adapted)
    _fail(adapted, NotReadyError("requests use it", reason="ADAPTER_IN_USE"), "a", "a-1")
    assert (await error_of(_unload(adapted))).reason == "ADAPTER_IN_USE"
    _fail(adapted, None, "a")
    assert await _unload(adapted) == {"a-0": "", "a-1": "ADAPTER_IN_USE"}
    assert await _list(adapted) == {"x": (False, ["a-1"])}


@pytest.mark.parametrize(
    ("calling", "reason"), [(_unload, "UNKNOWN_ADAPTER"), (lambda mesh: _load(mesh, path="/y"), "ADAPTER_EXISTS")]
)
async def test_a_call_that_contradicts_the_loaded_adapters_fails(
    adapted: Mesh, calling: Callable[[Mesh], Awaitable[object]], reason: str
) -> None:
    if reason == "ADAPTER_EXISTS":
        await _load(adapted)
    assert (await error_of(calling(adapted))).reason == reason


async def test_the_command_line_prints_the_outcome_for_each_replica(adapted: Mesh) -> None:
    _fail(adapted, INVALID, "a-1")
    server = ("--server", adapted.admin_endpoint)
    loaded = await stagemesh("admin", "lora", "load", "a", "x", "/x", *server)
    assert loaded.exit_code == 1
    assert loaded.stdout == "loaded x\n  a-0: rank 8, 0 running  /x\n  a-1: failed: no such folder\n"
    listed = await stagemesh("admin", "lora", "list", "a", *server)
    assert (listed.exit_code, listed.stdout) == (0, "1 adapters\n  x\n  a-0: rank 8, 0 running  /x\n")
    unloaded = await stagemesh("admin", "lora", "unload", "a", "x", *server)
    assert (unloaded.exit_code, unloaded.stdout) == (0, "unloaded x\n  a-0: unloaded\n")


async def test_adapters_are_not_loaded_on_a_single_replica(adapted: Mesh) -> None:
    call = StageControlServiceStub(adapted.admin).LoadAdapter(
        control_pb2.LoadAdapterRequest(name="x", path="/x"), timeout=10, metadata=(("stagemesh-replica", "a-0"),)
    )
    error = await error_of(call)
    assert "call AdminService.LoadAdapter" in error.message
