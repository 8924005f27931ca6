"""Open WebUI: the bodies that its source sends, written by hand, because the program is large."""

import json
import os
import urllib.request

from features import run_features

URL = os.environ["OPENAI_BASE_URL"]
HEADERS = {"Authorization": "Bearer none", "X-OpenWebUI-User-Name": "ada", "X-OpenWebUI-Chat-Id": "1"}
QUESTION = {"role": "user", "content": "What time is it?"}
PARAMETERS = {"type": "object", "properties": {"zone": {"type": "string", "description": ""}}, "required": ["zone"]}
TOOL = {"type": "function", "function": {"name": "read_clock", "description": "", "parameters": PARAMETERS}}
BOUNDARY = "boundary"


def send(path, body=None, kind="application/json"):
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(f"{URL}/{path}", data, {**HEADERS, "Content-Type": kind})
    with urllib.request.urlopen(request) as answer:
        return answer.read()


def ask(**fields):
    return json.loads(
        send("chat/completions", {"model": "scripted", "messages": [QUESTION], "stream": False, **fields})
    )


def deltas(**fields):
    events = send("chat/completions", {"stream": True, "model": "scripted", "messages": [QUESTION], **fields}).decode()
    *chunks, last = [line.removeprefix("data: ") for line in events.splitlines() if line]
    assert last == "[DONE]"
    return [choice["delta"] for chunk in chunks for choice in json.loads(chunk)["choices"]]


def models():
    assert json.loads(send("models"))["data"][0]["id"] == "scripted"


def stream():
    settings = {
        "stream_options": {"include_usage": True},
        "temperature": 0.7,
        "top_p": 0.9,
        "max_tokens": 128,
        "seed": 1,
    }
    pieces = [each.get("content") or "" for each in deltas(**settings, stop=["###"], reasoning_effort="medium")]
    assert "".join(pieces) == "Hello there."


def titles():
    assert ask(max_completion_tokens=1000)["choices"][0]["message"]["content"] == "Hello there."


def tools():
    calls = [call for each in deltas(tools=[TOOL]) for call in each.get("tool_calls") or ()]
    arguments = "".join(call["function"]["arguments"] for call in calls)
    function = {"name": calls[0]["function"]["name"], "arguments": arguments}
    call = {"index": 0, "id": calls[0]["id"], "type": "function", "function": function}
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "12:00"}]
    messages = [QUESTION, {"role": "assistant", "content": "", "tool_calls": [call]}, *results]
    assert "".join(each.get("content") or "" for each in deltas(messages=messages, tools=[TOOL])) == "It is noon."


def image():
    made = json.loads(send("images/generations", {"model": "digits", "prompt": "seven", "n": 1, "size": "32x32"}))
    url = f"data:image/png;base64,{made['data'][0]['b64_json']}"
    parts = [{"type": "text", "text": "What is it?"}, {"type": "image_url", "image_url": {"url": url}}]
    asked = ask(model="omni", max_tokens=4, messages=[{"role": "user", "content": parts}])
    assert asked["usage"]["completion_tokens"] in range(1, 5)


def speech_and_transcription():
    spoken = send("audio/speech", {"input": "The sea is calm.", "model": "tts-1", "voice": "alloy"})
    fields = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="model"\r\n\r\nwhisper-1\r\n--{BOUNDARY}\r\n'
    fields += 'Content-Disposition: form-data; name="file"; filename="a.mp3"\r\nContent-Type: audio/mpeg\r\n\r\n'
    form = fields.encode() + spoken + f"\r\n--{BOUNDARY}--\r\n".encode()
    assert "text" in json.loads(send("audio/transcriptions", form, f"multipart/form-data; boundary={BOUNDARY}"))


run_features(models, stream, titles, tools, image, speech_and_transcription)
