"""openai-agents: agents with tools, handoffs and sessions, on the Responses API and on chat completions."""

from agents import Agent, OpenAIChatCompletionsModel, Runner, SQLiteSession, function_tool, set_tracing_disabled
from features import run_features
from inputs import QUESTION, Clock, read_clock
from openai import AsyncOpenAI

# Traces go to OpenAI's own host.
set_tracing_disabled(True)
TOOLS = [function_tool(read_clock)]
MODELS = ("scripted", OpenAIChatCompletionsModel("scripted", AsyncOpenAI()))


def answers(model, **settings):
    return Runner.run_sync(Agent("clock", instructions="Be brief.", model=model, **settings), QUESTION)


def responses():
    assert answers("scripted").final_output == "Hello there."


def chat():
    assert answers(MODELS[1]).final_output == "Hello there."


def tools():
    for model in MODELS:
        result = answers(model, tools=TOOLS)
        assert result.final_output == "It is noon."
        assert result.new_items[1].output == "12:00 in noon"


async def stream():
    for model in MODELS:
        result = Runner.run_streamed(Agent("clock", model=model, tools=TOOLS), QUESTION)
        events = [event async for event in result.stream_events() if event.type == "raw_response_event"]
        deltas = [event.data.delta for event in events if event.data.type == "response.output_text.delta"]
        assert len(deltas) > 1
        assert "".join(deltas) == result.final_output == "It is noon."


def structured_output():
    for model in MODELS:
        assert answers(model, output_type=Clock).final_output == Clock(zone="noon")


def handoffs():
    for model in MODELS:
        clock = Agent("clock", model=model, handoff_description="Knows the time.")
        result = Runner.run_sync(Agent("front", model=model, handoffs=[clock]), QUESTION)
        assert (result.last_agent.name, result.final_output) == ("clock", "It is noon.")


async def sessions():
    for number, model in enumerate(MODELS):
        session = SQLiteSession(str(number))
        agent = Agent("clock", model=model, tools=TOOLS)
        for _ in range(2):
            assert (await Runner.run(agent, QUESTION, session=session)).final_output == "It is noon."
        assert len(await session.get_items()) == 8


run_features(responses, chat, tools, stream, structured_output, handoffs, sessions)
