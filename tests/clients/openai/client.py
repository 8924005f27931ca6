"""openai-python: chat, responses, audio, images and realtime."""

import base64
import json

import openai
from features import run_features
from inputs import QUESTION, Clock, silence

ai = openai.OpenAI()
MESSAGE = {"role": "user", "content": QUESTION}
WAV = silence()


def chat():
    answer = ai.chat.completions.create(model="scripted", messages=[MESSAGE])
    again = ai.chat.completions.create(model="scripted", messages=[MESSAGE, answer.choices[0].message, MESSAGE])
    assert again.choices[0].message.content == "Hello there."


def stream():
    with ai.chat.completions.stream(model="scripted", messages=[MESSAGE]) as events:
        deltas = [event.delta for event in events if event.type == "content.delta"]
        final = events.get_final_completion()
    assert len(deltas) > 1
    assert "".join(deltas) == final.choices[0].message.content == "Hello there."


def tools():
    tool = openai.pydantic_function_tool(Clock)
    answer = ai.chat.completions.parse(model="scripted", messages=[MESSAGE], tools=[tool])
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.parsed_arguments == Clock(zone="noon")
    result = {"role": "tool", "tool_call_id": call.id, "content": "12:00"}
    messages = [MESSAGE, answer.choices[0].message, result]
    answer = ai.chat.completions.parse(model="scripted", messages=messages, tools=[tool])
    assert answer.choices[0].message.content == "It is noon."


def structured_output():
    answer = ai.chat.completions.parse(model="scripted", messages=[MESSAGE], response_format=Clock)
    assert answer.choices[0].message.parsed == Clock(zone="noon")


def responses():
    first = ai.responses.create(model="scripted", input="Hello")
    with ai.responses.stream(model="scripted", input="And?", previous_response_id=first.id) as events:
        assert len([event for event in events if event.type == "response.output_text.delta"]) > 1
        assert events.get_final_response().output_text == "Hello there."
    tool = openai.pydantic_function_tool(Clock)["function"]
    first = ai.responses.parse(model="scripted", input="Hello", tools=[{"type": "function", **tool}])
    (call,) = first.output
    assert json.loads(call.arguments) == {"zone": "noon"}
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "12:00"}
    second = ai.responses.create(model="scripted", input=[result], previous_response_id=first.id)
    assert second.output_text == "It is noon."
    assert ai.responses.parse(model="scripted", input="Hello", text_format=Clock).output_parsed == Clock(zone="noon")


def image_and_audio_input():
    image = ai.images.generate(model="digits", prompt="the digit seven").data[0].b64_json
    parts = [
        {"type": "text", "text": "What is it?"},
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{image}"}},
        {"type": "input_audio", "input_audio": {"data": base64.b64encode(WAV).decode(), "format": "wav"}},
    ]
    answer = ai.chat.completions.create(model="omni", messages=[{"role": "user", "content": parts}], max_tokens=8)
    assert answer.usage.completion_tokens in range(1, 9)


def spoken_answer():
    audio = {"voice": "alloy", "format": "wav"}
    arguments = {"messages": [MESSAGE], "modalities": ["text", "audio"], "audio": audio, "max_tokens": 8}
    message = ai.chat.completions.create(model="omni", **arguments).choices[0].message
    assert base64.b64decode(message.audio.data).startswith(b"RIFF")


def speech():
    for model in ("speech", "tts-1"):
        spoken = ai.audio.speech.create(model=model, voice="alloy", input="The sea is calm.")
        assert len(spoken.content) > 1000


def transcription():
    for model in ("omni", "whisper-1"):
        ai.audio.transcriptions.create(model=model, file=WAV)


def image():
    (made,) = ai.images.generate(model="digits", prompt="the digit seven").data
    assert base64.b64decode(made.b64_json).startswith(b"\x89PNG")


async def realtime():
    async with openai.AsyncOpenAI().realtime.connect(model="speech") as connection:
        content = [{"type": "input_text", "text": "Tell me about the sea."}]
        await connection.conversation.item.create(item={"type": "message", "role": "user", "content": content})
        await connection.response.create(response={"max_output_tokens": 8})
        seen = set()
        async for event in connection:
            seen.add(event.type)
            if event.type in {"response.done", "error"}:
                break
    assert {"response.output_audio.delta", "response.output_audio_transcript.delta"} <= seen, seen


run_features(
    *(chat, stream, tools, structured_output, responses, image_and_audio_input, spoken_answer, speech, transcription),
    *(image, realtime),
)
