"""The warm tier: replicas that sleep until an orchestrator needs them. The replicas are processes."""

import asyncio
from pathlib import Path

from tests.orchestrator.scaling.processes import running_pipeline

# A request takes 100 s, and runs alone on its replica.
SLOW = """
pipeline: slow
stages: {say: {engine: fake, function: source, options: {steps: 100, step_s: 1, max_running: 1}}}
outputs: {text: say}
"""
# A request takes a tenth of a second.
CHAIN = """
pipeline: chain
stages:
  write: {engine: fake, function: source, options: {steps: 5, step_s: 0.02}}
  speak: {engine: fake, function: relay, options: {wake_s: 0.3}}
edges: [{from: write, to: speak, connector: shm}]
outputs: {text: speak}
"""


async def test_a_request_that_finds_all_replicas_busy_wakes_a_replica(tmp_path: Path) -> None:
    running = running_pipeline(tmp_path, SLOW, replicas={"say": 2}, sleepers={"say": 1}, warm={"say": 5})
    async with running as (orchestrator,):
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
    running = running_pipeline(
        tmp_path, SLOW, replicas={"say": 3}, sleepers={"say": 2}, warm={"say": 5}, orchestrators=2
    )
    async with running as (one, other):
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


async def test_a_sleeping_replica_of_another_stage_is_left_alone(tmp_path: Path) -> None:
    running = running_pipeline(tmp_path, SLOW, replicas={"say": 2}, sleepers={"say": 1}, warm={})
    async with running as (orchestrator,), orchestrator.requests(2):
        await orchestrator.until_stage("say", lambda stage: stage.queued_s > 0)
        await asyncio.sleep(1.0)
        assert (await orchestrator.states())["say-1"] == "ASLEEP"
