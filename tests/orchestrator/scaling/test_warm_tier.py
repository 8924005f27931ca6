"""The warm tier: replicas that sleep until an orchestrator needs them."""

import asyncio
import signal
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from stagemesh.rpc.channels import open_channel
from tests.orchestrator.mesh import until_health
from tests.orchestrator.running_pipeline import Orchestrator, running_pipeline
from tests.rpc.health_calls import Request, Response, check

pytestmark = pytest.mark.timeout(240)  # on a busy machine, processes take long to start

# A request takes 100 s, and runs alone on its replica.
SLOW = """
pipeline: slow
stages: {say: {engine: fake, function: source, options: {steps: 100, step_s: 1, max_running: 1}}}
outputs: {text: say}
"""
SHORT = SLOW.replace("steps: 100, step_s: 1,", "steps: 20, step_s: 0.1,")
# A request takes a tenth of a second.
CHAIN = """
pipeline: chain
stages:
  write: {engine: fake, function: source, options: {steps: 5, step_s: 0.02}}
  speak: {engine: fake, function: relay, options: {wake_s: 0.3}}
edges: [{from: write, to: speak, connector: shm}]
outputs: {text: speak}
"""


def running_say(
    folder: Path, text: str = SLOW, *, replicas: int = 2, warm_s: float | None = 5, **settings: Any
) -> AbstractAsyncContextManager[list[Orchestrator]]:
    """Runs a pipeline with the stage `say`, whose replicas sleep when they are idle, except the first one."""
    warm = {} if warm_s is None else {"say": warm_s}
    sleepers = {"say": replicas - 1}
    return running_pipeline(folder, text, replicas={"say": replicas}, sleepers=sleepers, warm=warm, **settings)


async def test_a_request_that_finds_all_replicas_busy_wakes_a_replica(tmp_path: Path) -> None:
    async with running_say(tmp_path) as (orchestrator,):
        await orchestrator.until_states(say_0="READY", say_1="ASLEEP")
        async with orchestrator.requests(1):
            await orchestrator.until_stage("say", lambda stage: stage.running == 1)
            assert (await orchestrator.states())["say-1"] == "ASLEEP"
            async with orchestrator.requests(1):
                await orchestrator.until_states(say_1="READY")
                # The request in the queue stays there, and the next one runs on the replica that woke.
                async with orchestrator.requests(1):
                    await orchestrator.until_stage("say", lambda stage: (stage.running, stage.queued) == (2, 1))


async def test_a_stage_without_a_ready_replica_wakes_one_for_any_request(tmp_path: Path) -> None:
    running = running_pipeline(tmp_path, CHAIN, sleepers={"speak": 1}, warm={"speak": 1000})
    async with running as (orchestrator,):
        await orchestrator.until_states(write_0="READY", speak_0="ASLEEP")
        result = await orchestrator.client.generate("hello").result()
        assert result.text
        assert (await orchestrator.states())["speak-0"] == "READY"


async def test_a_replica_that_woke_sleeps_again_when_it_is_idle_and_no_request_fails(tmp_path: Path) -> None:
    running = running_pipeline(tmp_path, CHAIN, sleepers={"speak": 1}, sleep_when_idle_s=1.0, warm={"speak": 0})
    async with running as (orchestrator,):
        assert (await orchestrator.client.generate("hello").result()).text
        await orchestrator.until_states(speak_0="ASLEEP")
        assert (await orchestrator.client.generate("hello").result()).text
        await orchestrator.until_states(speak_0="DRAINING")
        assert (await orchestrator.client.generate("hello").result()).text


async def test_several_orchestrators_wake_the_same_replica(tmp_path: Path) -> None:
    async with running_say(tmp_path, replicas=3, orchestrators=2) as (one, other):
        for each in (one, other):
            await each.until_states(say_0="READY", say_1="ASLEEP", say_2="ASLEEP")
        async with one.requests(1), other.requests(1):
            for each in (one, other):
                await each.until_states(say_1="READY")
            # A replica without work is ready, so that neither orchestrator wakes a third one.
            await asyncio.sleep(1.0)
            assert (await one.states())["say-2"] == "ASLEEP"
            async with one.requests(1), other.requests(1):
                await one.until_states(say_2="READY")


async def test_a_replica_that_hangs_when_it_is_woken_is_passed_over(tmp_path: Path) -> None:
    async with running_say(tmp_path, replicas=3, processes={"say-1"}) as (orchestrator,):
        await orchestrator.until_states(say_0="READY", say_1="ASLEEP", say_2="ASLEEP")
        orchestrator.replicas["say-1"].send_signal(signal.SIGSTOP)
        async with orchestrator.requests(2):
            await orchestrator.until_states(say_1="UNREACHABLE", say_2="READY")


async def test_a_sleeping_replica_is_ready_for_rolling_updates_but_not_for_steps(tmp_path: Path) -> None:
    async with running_say(tmp_path, processes={"say-1"}) as (orchestrator,):
        await orchestrator.until_states(say_0="READY", say_1="ASLEEP")
        async with open_channel(orchestrator.endpoints["say-1"]) as channel:
            await until_health(channel, serving=True, service="say")
            assert (await check(channel)(Request(service=""))).status == Response.NOT_SERVING


async def test_a_replica_that_is_lost_is_replaced_by_a_sleeping_one(tmp_path: Path) -> None:
    running = running_say(tmp_path, SHORT, warm_s=1000, processes={"say-0"})
    async with running as (orchestrator,), asyncio.TaskGroup() as group:
        await orchestrator.until_states(say_0="READY", say_1="ASLEEP")
        result = group.create_task(orchestrator.client.generate("hello").result())
        await orchestrator.until_stage("say", lambda stage: stage.running == 1)
        orchestrator.replicas["say-0"].kill()
        assert (await result).text
        assert (await orchestrator.states())["say-1"] == "READY"


async def test_a_sleeping_replica_of_a_stage_that_is_not_warm_is_left_alone(tmp_path: Path) -> None:
    async with running_say(tmp_path, warm_s=None) as (orchestrator,), orchestrator.requests(2):
        await orchestrator.until_states(say_0="READY", say_1="ASLEEP")
        await orchestrator.until_stage("say", lambda stage: stage.queued_s > 0)
        await asyncio.sleep(1.0)
        assert (await orchestrator.states())["say-1"] == "ASLEEP"
