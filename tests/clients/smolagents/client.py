"""smolagents: its model of OpenAI's API, and an agent that calls tools."""

import os

from features import run_features
from PIL import Image
from smolagents import OpenAIModel, ToolCallingAgent, tool
from smolagents.models import ChatMessage, MessageRole

SETTINGS = {"api_base": os.environ["OPENAI_BASE_URL"], "api_key": os.environ["OPENAI_API_KEY"]}
model = OpenAIModel("scripted", **SETTINGS)
MESSAGES = [ChatMessage(role=MessageRole.USER, content=[{"type": "text", "text": "What time is it?"}])]


@tool
def read_clock(zone: str) -> str:
    """Returns the time in a zone.

    Args:
        zone: The zone.
    """
    return f"12:00 in {zone}"


def chat():
    assert model.generate(MESSAGES).content == "Hello there."
    assert model.generate(MESSAGES, stop_sequences=["!"]).token_usage.output_tokens == 2


def stream():
    pieces = [delta.content or "" for delta in model.generate_stream(MESSAGES)]
    assert len(pieces) > 2
    assert "".join(pieces) == "Hello there."


def tools():
    for streams in (False, True):
        agent = ToolCallingAgent(
            tools=[read_clock], model=model, stream_outputs=streams, max_steps=1, verbosity_level=0
        )
        assert agent.run("What time is it?") == "Hello there."
        assert agent.memory.steps[1].observations == "12:00 in noon"


def structured_output():
    schema = {"type": "object", "properties": {"zone": {"type": "string"}}, "required": ["zone"]}
    wanted = {"type": "json_schema", "json_schema": {"name": "clock", "schema": schema, "strict": True}}
    assert model.generate(MESSAGES, response_format=wanted).content == '{"zone": "noon"}'


def image_input():
    parts = [{"type": "text", "text": "What is it?"}, {"type": "image", "image": Image.new("RGB", (32, 32))}]
    omni = OpenAIModel("omni", max_tokens=4, **SETTINGS)
    answer = omni.generate([ChatMessage(role=MessageRole.USER, content=parts)])
    assert answer.token_usage.output_tokens in range(1, 5)


run_features(chat, stream, tools, structured_output, image_input)
