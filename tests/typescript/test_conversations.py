"""Sessions of the client in TypeScript with real processes: the pipeline receives what the client said and heard."""

from collections.abc import Callable, Iterator

import pytest

from tests.deployment import Deployment, deployed
from tests.system.breakable_relay import breakable_relay
from tests.system.conversing import ExpectedConversation, talking
from tests.typescript.sessions import session

STEPS = 20
SEED = {"seed": 7}


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with deployed(talking(tmp_path_factory.mktemp("talk"), steps=STEPS, park_s=0.3)) as up:
        yield up


@pytest.fixture
def expected() -> ExpectedConversation:
    return ExpectedConversation(7, steps=STEPS)


async def test_an_interrupted_and_truncated_answer_is_what_the_pipeline_remembers(
    up: Deployment, expected: ExpectedConversation
) -> None:
    async with session(up.endpoint, outputs=["text"], parameters=SEED) as talk:
        await talk.do("append", "one")
        await talk.do("commit")
        await talk.do("read", "output", 5)
        await talk.do("interrupt")
        await talk.do("answer")
        heard = (await talk.do("truncate", {"positions": {"text": 8}}))["answer"]
        assert heard == expected.answer("one")[:8]
        expected.add("one", heard=heard)
        assert await talk.say("two") == expected.answer("two")


@pytest.mark.parametrize("loss", ["broken connection", "killed orchestrator"])
async def test_a_conversation_survives_a_loss(up: Deployment, expected: ExpectedConversation, loss: str) -> None:
    with breakable_relay(up.endpoint) as way:
        lose: Callable[[], None] = way.cut if loss == "broken connection" else lambda: up.kill("orchestrator")
        async with session(way.endpoint, outputs=["text"], parameters=SEED) as talk:
            answer = await talk.say("one")
            assert answer == expected.answer("one")
            expected.add("one", heard=answer)
            await talk.do("append", "two")
            await talk.do("commit")
            before = len(talk.events)
            await talk.do("read", "output", 5)
            lose()
            await talk.do("answer")
            answer = talk.text(talk.events[before:])
            assert answer == expected.answer("two")
            expected.add("two", heard=answer)
            assert await talk.say("three") == expected.answer("three")
        assert talk.kinds.count("committed") == talk.kinds.count("ended") == 3


async def test_streamed_text_is_answered_while_it_is_appended(up: Deployment) -> None:
    async with session(up.endpoint, inputMode=2, outputs=["audio"]) as talk:
        await talk.do("append", "Hello " * 100)
        await talk.do("read", "output")
        await talk.do("append", "you.")
        await talk.do("commit")
        await talk.do("answer")
    assert talk.kinds[-1] == "ended"
    assert talk.kinds.index("output") < talk.kinds.index("committed")
