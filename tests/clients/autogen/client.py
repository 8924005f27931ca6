"""AutoGen: an assistant with a tool, its stream, and its model client."""

import os

from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.messages import ModelClientStreamingChunkEvent, MultiModalMessage
from autogen_core import Image
from autogen_core.models import UserMessage
from autogen_ext.models.openai import OpenAIChatCompletionClient
from features import run_features
from inputs import QUESTION, Clock, read_clock
from PIL import Image as Picture


def model(name="scripted", **settings):
    abilities = dict.fromkeys(("vision", "function_calling", "json_output", "structured_output"), True)
    info = {**abilities, "family": "unknown"}
    return OpenAIChatCompletionClient(model=name, base_url=os.environ["OPENAI_BASE_URL"], model_info=info, **settings)


async def chat():
    result = await model().create([UserMessage(content=QUESTION, source="user")])
    assert (result.content, result.usage.completion_tokens) == ("Hello there.", 2)


async def tools():
    agent = AssistantAgent("clock", model(), tools=[read_clock], reflect_on_tool_use=True)
    for _ in range(2):
        messages = (await agent.run(task=QUESTION)).messages
        assert messages[-1].content == "It is noon."


async def stream():
    agent = AssistantAgent("clock", model(), tools=[read_clock], model_client_stream=True, reflect_on_tool_use=True)
    events = [event async for event in agent.run_stream(task=QUESTION)]
    pieces = [event.content for event in events if isinstance(event, ModelClientStreamingChunkEvent)]
    assert len(pieces) > 1
    assert "".join(pieces) == "It is noon."


async def structured_output():
    agent = AssistantAgent("clock", model(), output_content_type=Clock)
    assert (await agent.run(task=QUESTION)).messages[-1].content == Clock(zone="noon")


async def image_input():
    picture = Image(Picture.new("RGB", (32, 32)))
    agent = AssistantAgent("clock", model("omni", max_tokens=4))
    message = MultiModalMessage(content=["What is it?", picture], source="user")
    assert (await agent.run(task=message)).messages[-1].models_usage.completion_tokens in range(1, 5)


run_features(chat, tools, stream, structured_output, image_input)
