"""Conversations in which every third answer is interrupted at a random moment, while stages are killed. What the user
heard, the transcript and the state of the stages agree.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.deployment import deployed
from tests.soak.conversations import ConversationPlan, ConversationReport, RepeatedConversation, converse
from tests.system.conversing import ExpectedConversation, sound_of, talking

STEPS, STEP_S = 24, 0.03
SEED = 7
LOAD_S = 400.0


async def _converse(folder: Path, plan: ConversationPlan) -> ConversationReport:
    with deployed(talking(folder, steps=STEPS, step_s=STEP_S, replicas=2)) as up:
        report = await converse(up, plan, ExpectedConversation(SEED, steps=STEPS), sound_of=sound_of, seed=SEED)
    print(report.summary())
    assert report.problems == []
    return report


@pytest.mark.timeout(300)
async def test_a_conversation_of_four_turns_is_consistent(tmp_path: Path) -> None:
    plan = ConversationPlan(turns=4, seed=3, interrupt_every=2, kill_every=3, answer_s=STEPS * STEP_S)
    report = await _converse(tmp_path, plan)
    assert report.counts["killed stages"] == 1
    assert report.counts["interrupted turns"] >= 1


@pytest.mark.soak
@pytest.mark.timeout(1800)
async def test_a_conversation_of_two_hundred_turns_is_consistent(tmp_path: Path) -> None:
    report = await _converse(tmp_path, ConversationPlan(turns=200, seed=4, answer_s=STEPS * STEP_S))
    assert report.counts["killed stages"] == 10
    assert report.counts["interrupted turns"] >= 50


@pytest.mark.speech
@pytest.mark.soak
@pytest.mark.timeout(1800)
async def test_a_spoken_conversation_is_consistent() -> None:
    plan = ConversationPlan(turns=10, seed=5, kill_every=5, answer_s=2.0, turn_s=LOAD_S)
    options: dict[str, Any] = {"max_tokens": 40, "temperature": 0.0}
    with deployed("speech", ready_s=LOAD_S) as up, up.client() as client:
        expected = RepeatedConversation(client, seed=SEED, outputs=["text"], **options)
        report = await converse(up, plan, expected, sound_of=None, seed=SEED, **options)
    print(report.summary())
    assert report.problems == []
    assert report.counts["killed stages"] == 2
