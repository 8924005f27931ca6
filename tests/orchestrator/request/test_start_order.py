import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

from stagemesh.v1 import stage_pb2
from tests.orchestrator.mesh import DIAMOND, Mesh, mesh
from tests.orchestrator.scripted_stage import ACCEPTED, FINISHED, Response, Script, ScriptedStage


def _accepting_when(gate: asyncio.Event) -> Script:
    async def script(stage: ScriptedStage, request: stage_pb2.ExecuteStepRequest) -> AsyncIterator[Response]:
        del request
        stage.started.set()
        await gate.wait()
        yield ACCEPTED
        yield FINISHED

    return script


def _asked(diamond: Mesh) -> set[str]:
    return {name for name, stage in diamond.stages.items() if stage.requests}


async def test_producers_start_only_when_all_their_consumers_have_accepted(tmp_path: Path) -> None:
    gates = {name: asyncio.Event() for name in ("join", "left", "right")}
    scripts = {name: _accepting_when(gate) for name, gate in gates.items()}
    async with mesh(tmp_path, DIAMOND, scripts=scripts) as diamond, asyncio.TaskGroup() as group:
        group.create_task(diamond.generate())
        await diamond.stages["join"].started.wait()
        assert _asked(diamond) == {"join"}
        gates["join"].set()
        await asyncio.gather(*(diamond.stages[name].started.wait() for name in ("left", "right")))
        assert _asked(diamond) == {"join", "left", "right"}
        gates["left"].set()
        await diamond.stages["left"].idle.wait()
        assert "top" not in _asked(diamond)
        gates["right"].set()
        await diamond.stages["top"].started.wait()
