"""Sessions over gRPC, with scripted stages."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

from stagemesh.v1 import orchestrator_pb2, request_pb2, stage_pb2
from tests.orchestrator.mesh import mesh
from tests.orchestrator.scripted_stage import ACCEPTED, FINISHED, Response, ScriptedStage, hang, tensors_of, text_output
from tests.orchestrator.session.talk import Talk, talking


async def test_a_turn_is_answered(tmp_path: Path) -> None:
    async with mesh(tmp_path) as chain, talking(chain.stub, session_id="s") as talk:
        answer = await talk.turn("hello")
    assert answer == "a done"
    assert talk.kinds(1) == ["committed", "ended"]
    assert talk.texts(1, "last") == "c done"


async def test_the_prompt_contains_the_transcript(tmp_path: Path) -> None:
    async with mesh(tmp_path) as chain, talking(chain.stub, session_id="s") as talk:
        await talk.turn("one")
        await talk.turn("two")
        prompt = chain.stages["a"].requests[1].input.conversation
    assert [message.content for message in prompt.messages] == ["one", "a done", "two"]


async def test_turns_are_requests_with_consecutive_seeds(tmp_path: Path) -> None:
    async with mesh(tmp_path) as chain, talking(chain.stub, session_id="s") as talk:
        seed = talk.received[0].opened.seed
        for text in ("one", "two"):
            await talk.turn(text)
        steps = [(step.request_id, step.seed) for step in chain.stages["a"].requests]
    assert steps == [("s.1", seed), ("s.2", seed + 1)]
