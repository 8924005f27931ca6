"""Sessions of the client in TypeScript with real processes: the pipeline receives what the client said and heard."""

from collections.abc import Callable

import pytest

from tests.deployment import Deployment, deployed_for_module
from tests.system.breakable_relay import breakable_relay
from tests.system.conversing import ExpectedConversation, talking
from tests.typescript.sessions import typescript

STEPS = 20
SEED = {"seed": 7}


up = deployed_for_module(lambda folder: talking(folder, steps=STEPS, park_s=0.3))


@pytest.fixture
def expected() -> ExpectedConversation:
    return ExpectedConversation(7, steps=STEPS)


async def test_the_pipeline_remembers_a_truncated_answer(up: Deployment, expected: ExpectedConversation) -> None:
    async with typescript(up.endpoint, outputs=["text"], parameters=SEED) as talk:
        await talk.append("one")
        await talk.commit()
        await talk.read("text", 5)
        await talk.interrupt()
        await talk.read_answer()
        heard = await talk.truncate(positions={"text": 8})
        assert heard == expected.answer("one")[:8]
        expected.add("one", heard=heard)
        assert await talk.say("two") == expected.answer("two")


@pytest.mark.parametrize("loss", ["broken connection", "killed orchestrator"])
async def test_a_conversation_survives_a_loss(up: Deployment, expected: ExpectedConversation, loss: str) -> None:
    with breakable_relay(up.endpoint) as way:
        lose: Callable[[], None] = way.cut if loss == "broken connection" else lambda: up.kill("orchestrator")
        async with typescript(way.endpoint, outputs=["text"], parameters=SEED) as talk:
            answer = await talk.say("one")
            assert answer == expected.answer("one")
            expected.add("one", heard=answer)
            await talk.append("two")
            await talk.commit()
            before = len(talk.seen("text", "delta"))
            await talk.read("text", 5)
            lose()
            await talk.read_answer()
            answer = "".join(talk.seen("text", "delta")[before:])
            assert answer == expected.answer("two")
            expected.add("two", heard=answer)
            assert await talk.say("three") == expected.answer("three")
        assert talk.kinds.count("committed") == talk.kinds.count("ended") == 3


async def test_streamed_text_is_answered_while_it_is_appended(up: Deployment) -> None:
    async with typescript(up.endpoint, input_mode="stream", outputs=["audio"]) as talk:
        await talk.append("Hello " * 100)
        await talk.read("audio")
        await talk.append("you.")
        await talk.commit()
        await talk.read_answer()
    assert talk.kinds[-1] == "ended"
    assert talk.kinds.index("audio") < talk.kinds.index("committed")
