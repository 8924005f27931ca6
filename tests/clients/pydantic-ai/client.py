"""pydantic-ai: agents on the Responses API, which `openai:` stands for, and on chat completions."""

import io
import struct
import wave

from features import run_features
from pydantic import BaseModel
from pydantic_ai import Agent, BinaryContent, NativeOutput

MODELS = ("openai:scripted", "openai-chat:scripted")
QUESTION = "What time is it?"


class Clock(BaseModel):
    zone: str


def read_clock(zone: str) -> str:
    """Returns the time in a zone."""
    return f"12:00 in {zone}"


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
    sound = io.BytesIO()
    with wave.open(sound, "wb") as file:
        file.setparams((1, 2, 16_000, 0, "NONE", ""))
        file.writeframes(struct.pack("<h", 0) * 16_000)
    settings = {"max_tokens": 4}
    prompt = [QUESTION, BinaryContent(sound.getvalue(), media_type="audio/wav")]
    assert Agent("openai-chat:omni", model_settings=settings).run_sync(prompt).usage.output_tokens in range(1, 5)


run_features(responses, chat, tools, stream, structured_output, audio_input)
