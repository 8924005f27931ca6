"""instructor: objects out of answers, in each of its modes for OpenAI's API."""

import instructor
from features import run_features
from inputs import QUESTION, Clock
from openai import AsyncOpenAI, OpenAI

MESSAGES = [{"role": "user", "content": QUESTION}]


def extracts(mode, **settings):
    ai = instructor.from_openai(OpenAI(), mode=mode)
    return ai.chat.completions.create(model="scripted", messages=MESSAGES, response_model=Clock, **settings).zone


def tools():
    assert extracts(instructor.Mode.TOOLS) == extracts(instructor.Mode.TOOLS_STRICT) == "noon"


def structured_output():
    assert extracts(instructor.Mode.JSON_SCHEMA) == "noon"


def responses():
    ai = instructor.from_openai(OpenAI(), mode=instructor.Mode.RESPONSES_TOOLS)
    assert ai.responses.create(model="scripted", input=MESSAGES, response_model=Clock).zone == "noon"


def provider():
    ai = instructor.from_provider("openai/scripted")
    assert ai.create(messages=MESSAGES, response_model=Clock).zone == "noon"


def lists():
    ai = instructor.from_openai(OpenAI())
    made = ai.chat.completions.create(model="scripted", messages=MESSAGES, response_model=list[Clock])
    assert list(made) == [Clock(zone="noon")]


async def stream():
    ai = instructor.from_openai(AsyncOpenAI())
    parts = ai.chat.completions.create_partial(model="scripted", messages=MESSAGES, response_model=Clock)
    assert [part async for part in parts][-1].zone == "noon"


run_features(tools, structured_output, responses, provider, lists, stream)
