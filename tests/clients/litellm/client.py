"""LiteLLM, and its proxy in front of the gateway."""

import io
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

# The prices of models would come from another host.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "true"

import litellm
import openai
from features import run_features
from inputs import QUESTION, Clock, silence

URL = os.environ["OPENAI_BASE_URL"]
MESSAGES = [{"role": "user", "content": QUESTION}]
TOOL = openai.pydantic_function_tool
CONFIG = """\
model_list:
  - {{model_name: scripted, litellm_params: {{model: openai/scripted, api_base: "{0}", api_key: none}}}}
  - {{model_name: speech, litellm_params: {{model: openai/speech, api_base: "{0}", api_key: none}}}}
"""


def completion(**settings):
    return litellm.completion(model="openai/scripted", messages=MESSAGES, **settings)


def chat():
    message = completion().choices[0].message
    again = litellm.completion(model="openai/scripted", messages=[*MESSAGES, message, *MESSAGES], user="ada")
    assert (again.choices[0].message.content, again.choices[0].finish_reason) == ("Hello there.", "stop")


def stream():
    chunks = list(completion(stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "Hello there."
    assert litellm.stream_chunk_builder(chunks).usage.completion_tokens == 2


def tools():
    message = completion(tools=[TOOL(Clock)], tool_choice="auto").choices[0].message
    (call,) = message.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "name": "Clock", "content": "12:00"}
    answer = litellm.completion(model="openai/scripted", messages=[*MESSAGES, message, result], tools=[TOOL(Clock)])
    assert answer.choices[0].message.content == "It is noon."


def structured_output():
    made = completion(response_format=Clock).choices[0].message.content
    assert Clock.model_validate_json(made) == Clock(zone="noon")


def reasoning():
    message = [{"role": "user", "content": "REASON"}]
    made = litellm.completion(model="openai/scripted", messages=message, reasoning_effort="low").choices[0].message
    assert (made.reasoning_content, made.content) == ("Let me think.", "Hello there.")


def responses():
    assert litellm.responses(model="openai/scripted", input="Hello").output_text == "Hello there."


def error_codes():
    try:
        litellm.completion(model="openai/omni", messages=[{"role": "user", "content": "word " * 4000}])
    except litellm.ContextWindowExceededError:
        return
    raise AssertionError("the prompt is not too long")


def speech():
    assert len(litellm.speech(model="openai/speech", input="The sea is calm.", voice="alloy").content) > 1000


def transcription():
    sound = io.BytesIO(silence())
    sound.name = "sound.wav"
    litellm.transcription(model="openai/omni", file=sound)


def image():
    assert litellm.image_generation(model="openai/digits", prompt="the digit seven").data[0].b64_json


def proxy():
    Path("config.yaml").write_text(CONFIG.format(URL))
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    program = Path(sys.executable).with_name("litellm")
    command = [program, "--config", "config.yaml", "--host", "127.0.0.1", "--port", str(port), "--telemetry", "False"]
    # The proxy has a key, and its callers send it.
    key = "sk-proxy"
    with subprocess.Popen(command, stdout=sys.stderr, env={**os.environ, "LITELLM_MASTER_KEY": key}) as process:
        try:
            ai = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=key, max_retries=0)
            deadline_s = time.monotonic() + 150
            while not _answers(ai):
                assert process.poll() is None, "the proxy ended"
                assert time.monotonic() < deadline_s, "the proxy does not start"
                time.sleep(1)
            _use(ai)
        finally:
            process.terminate()


def _answers(ai):
    try:
        return ai.models.list()
    except openai.APIConnectionError:
        return False


def _use(ai):
    create = ai.chat.completions.create
    assert create(model="scripted", messages=MESSAGES).choices[0].message.content == "Hello there."
    pieces = [
        chunk.choices[0].delta.content or "" for chunk in create(model="scripted", messages=MESSAGES, stream=True)
    ]
    assert "".join(pieces) == "Hello there."
    made = ai.chat.completions.parse(model="scripted", messages=MESSAGES, tools=[TOOL(Clock)])
    assert made.choices[0].message.tool_calls[0].function.parsed_arguments == Clock(zone="noon")
    assert ai.responses.create(model="scripted", input="Hello").output_text == "Hello there."
    assert len(ai.audio.speech.create(model="speech", voice="alloy", input="The sea.").content) > 1000


run_features(
    *(chat, stream, tools, structured_output, reasoning, responses, error_codes, speech, transcription, image, proxy)
)
