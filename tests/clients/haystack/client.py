"""haystack: its generators, and an agent with a tool."""

import os

from features import run_features
from haystack.components.agents import Agent
from haystack.components.generators.chat import OpenAIChatGenerator, OpenAIResponsesChatGenerator
from haystack.dataclasses import ChatMessage, ImageContent
from haystack.tools import tool
from inputs import QUESTION, Clock, read_clock

URL = os.environ["OPENAI_BASE_URL"]
MESSAGES = [ChatMessage.from_user(QUESTION)]
KINDS = (OpenAIChatGenerator, OpenAIResponsesChatGenerator)


def generates(kind, **settings):
    return kind(model="scripted", api_base_url=URL, **settings).run(MESSAGES)["replies"][0]


def chat():
    assert generates(OpenAIChatGenerator).text == "Hello there."


def responses():
    assert generates(OpenAIResponsesChatGenerator).text == "Hello there."


def stream():
    pieces = []
    for kind in KINDS:
        assert generates(kind, streaming_callback=pieces.append).text == "Hello there."
    assert "".join(piece.content for piece in pieces) == "Hello there." * len(KINDS)


def tools():
    for kind in KINDS:
        for strict in (False, True):
            generator = kind(model="scripted", api_base_url=URL, tools_strict=strict)
            answer = Agent(chat_generator=generator, tools=[tool(read_clock)], system_prompt="Be brief.").run(MESSAGES)
            assert answer["last_message"].text == "It is noon."


def structured_output():
    made = generates(OpenAIChatGenerator, generation_kwargs={"response_format": Clock})
    assert Clock.model_validate_json(made.text) == Clock(zone="noon")


def image_input():
    from PIL import Image

    Image.new("RGB", (32, 32)).save("image.png")
    message = ChatMessage.from_user(
        content_parts=["What is it?", ImageContent.from_file_path("image.png", detail="low")]
    )
    generator = OpenAIChatGenerator(model="omni", api_base_url=URL, generation_kwargs={"max_tokens": 4})
    assert generator.run([message])["replies"][0].meta["usage"]["completion_tokens"] in range(1, 5)


run_features(chat, responses, stream, tools, structured_output, image_input)
