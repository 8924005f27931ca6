"""llama-index: its model of servers with OpenAI's API, and an agent of its workflows."""

import os

from features import run_features
from inputs import QUESTION, Clock, read_clock
from llama_index.core.agent.workflow import AgentStream, FunctionAgent
from llama_index.core.llms import ChatMessage, ImageBlock, TextBlock
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike

SETTINGS = {"api_base": os.environ["OPENAI_BASE_URL"], "api_key": os.environ["OPENAI_API_KEY"]}
model = OpenAILike(model="scripted", is_chat_model=True, is_function_calling_model=True, **SETTINGS)
MESSAGES = [ChatMessage(QUESTION)]


def chat():
    answer = model.chat(MESSAGES).message
    assert model.chat([*MESSAGES, answer, *MESSAGES]).message.content == "Hello there."


def completion():
    assert OpenAILike(model="scripted", **SETTINGS).complete(QUESTION).text == "Hello there."


def stream():
    pieces = [piece.delta for piece in model.stream_chat(MESSAGES)]
    assert len(pieces) > 2
    assert "".join(pieces) == "Hello there."


def tools():
    tool = FunctionTool.from_defaults(read_clock)
    assert model.predict_and_call([tool], QUESTION).response == "12:00 in noon"


async def agent():
    handler = FunctionAgent(tools=[read_clock], llm=model, system_prompt="Be brief.").run(QUESTION)
    pieces = [event.delta async for event in handler.stream_events() if isinstance(event, AgentStream)]
    assert "".join(pieces) == str(await handler) == "It is noon."


def structured_output():
    assert model.as_structured_llm(Clock).complete(QUESTION).raw == Clock(zone="noon")


def image_input():
    from PIL import Image

    Image.new("RGB", (32, 32)).save("image.png")
    omni = OpenAILike(model="omni", is_chat_model=True, max_tokens=4, **SETTINGS)
    blocks = [TextBlock(text="What is it?"), ImageBlock(path="image.png")]
    assert omni.chat([ChatMessage(blocks=blocks)]).raw.usage.completion_tokens in range(1, 5)


run_features(chat, completion, stream, tools, agent, structured_output, image_input)
