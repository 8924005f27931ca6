"""pydantic-ai: agents on the Responses API, which `openai:` stands for, and on chat completions."""

from features import run_features
from inputs import QUESTION, Clock, read_clock, silence
from pydantic_ai import Agent, BinaryContent, NativeOutput

MODELS = ("openai:scripted", "openai-chat:scripted")


def responses():
    assert Agent(MODELS[0], instructions="Be brief.").run_sync(QUESTION).output == "Hello there."


def chat():
    first = Agent(MODELS[1]).run_sync(QUESTION)
    again = Agent(MODELS[1]).run_sync("And?", message_history=first.all_messages())
    assert (again.output, again.usage.output_tokens) == ("Hello there.", 2)


def tools():
    for model in MODELS:
        agent = Agent(model, tools=[read_clock])
        result = agent.run_sync(QUESTION)
        assert result.output == "It is noon."
        assert agent.run_sync(QUESTION, message_history=result.all_messages()).output == "It is noon."


async def stream():
    for model in MODELS:
        async with Agent(model).run_stream(QUESTION) as result:
            assert [piece async for piece in result.stream_text(debounce_by=None)][-1] == "Hello there."


def structured_output():
    for model in MODELS:
        for output in (Clock, NativeOutput(Clock)):
            assert Agent(model, output_type=output).run_sync(QUESTION).output == Clock(zone="noon")


def audio_input():
    settings = {"max_tokens": 4}
    prompt = [QUESTION, BinaryContent(silence(), media_type="audio/wav")]
    assert Agent("openai-chat:omni", model_settings=settings).run_sync(prompt).usage.output_tokens in range(1, 5)


run_features(responses, chat, tools, stream, structured_output, audio_input)
