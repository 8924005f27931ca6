"""Stages of Stagemesh itself pass the cases of `stagemesh conformance`, which find defects that are planted in them."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from stagemesh.rpc.channels import open_channel
from stagemesh.stage_conformance.cases import Verdict
from stagemesh.stage_conformance.driver import Settings
from stagemesh.stage_conformance.played_consumer import Consumer
from stagemesh.v1 import stage_pb2, stage_pb2_grpc
from tests.conformance.stages import SLOW, check, count, failures, python_stage
from tests.rpc.call_errors import error_of
from tests.system.added_transforms import add_function

WAITING = ("consumer.no-hello", "steps.caller-returns", "steps.last-caller-leaves")
"""The cases that wait long, and do not depend on the engine."""


async def test_stages_pass_all_cases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    module = "from tests.typescript.python_upper import UPPER as DESCRIPTOR\n"
    add_function(tmp_path, monkeypatch, name="upper", source=module)
    for_clients = Settings(has_output=False)
    async with (
        python_stage(tmp_path, "relay") as relay,
        python_stage(tmp_path, "source") as source,
        python_stage(tmp_path, "sound") as sound,
        python_stage(tmp_path, "upper", engine="function") as upper,
    ):
        # Most cases wait: four runs at once take little longer than one.
        results = await asyncio.gather(
            check(relay),
            check(source, "steps.*", "producer.*"),
            check(sound, "steps.*", "consumer.*", settings=for_clients, without=WAITING),
            check(upper, "consumer.*", "producer.*", without=(*SLOW, *WAITING)),
        )
    for found, wanted in zip(results, (300, 100, 160, 210), strict=True):
        assert failures(found) == {}
        assert count(found) >= wanted
    assert count(results[0], Verdict.NOT_SERVED) == 0


async def test_streams_of_other_stages_disturb_no_case() -> None:
    stage = Consumer("conformance.c", "127.0.0.1", "one")
    await stage.start()
    async with open_channel(stage.endpoint) as channel:
        calls: list[Any] = [stage_pb2_grpc.StageServiceStub(channel).PutChunk() for _ in range(2)]
        for call, incarnation in zip(calls, ("another", "one"), strict=True):
            await call.write(stage_pb2.PutChunkRequest(hello=stage_pb2.Hello(replica="s", incarnation=incarnation)))
        assert (await calls[1].read()).HasField("welcome")
        assert (await error_of(calls[0].read())).reason == "WRONG_PIPELINE"
    assert len(stage.connections) == 1
    await stage.stop()


_DEFECTS = {
    "producer.resync-limit": "from stagemesh.connectors.flow import outlet_attempt as m; m.MAX_RESYNCS = 20",
    "consumer.resync-limit": "from stagemesh.connectors.flow import inlet_attempt as m; m.MAX_RESYNCS = 9",
    "steps.repeated-after-end": "from stagemesh.services.stage.step import run_index as m; m.KEPT_S = 0.0",
    "steps.last-caller-leaves": "from stagemesh.services.stage.step import run as m; m.ABANDON_S = 0.5",
    "producer.credit-chunks": (
        "from stagemesh.connectors.flow import outlet, sent_chunks\n"
        "outlet.Outlet.has_credit = lambda *_: True\n"
        "sent_chunks.SentChunk.is_within = lambda *_: True"
    ),
    "steps.text.stray-continuation": (
        "from stagemesh.services.stage.step import outputs as m\n"
        "m.codecs.getincrementaldecoder('utf-8').decode = lambda self, data, final=False: data.decode('latin-1')"
    ),
}
"""A program that plants a defect in the stage, for each case that finds it."""


@pytest.mark.parametrize("case", _DEFECTS)
async def test_planted_defect_is_found(tmp_path: Path, case: str) -> None:
    async with python_stage(tmp_path, "relay", defect=_DEFECTS[case]) as endpoint:
        assert list(failures(await check(endpoint, case))) == [case]
