"""openai-agents: realtime sessions, and its pipeline of transcription, agent and speech."""

import os

import numpy as np
from agents import Agent, function_tool, set_tracing_disabled
from agents.realtime import RealtimeAgent, RealtimeRunner
from agents.voice import AudioInput, SingleAgentVoiceWorkflow, VoicePipeline
from features import run_features

set_tracing_disabled(True)  # Traces go to OpenAI's servers.
REALTIME = os.environ["OPENAI_BASE_URL"].replace("http", "ws") + "/realtime?model="
ZONES = []


@function_tool
def read_clock(zone: str) -> str:
    """Returns the time in a zone."""
    ZONES.append(zone)
    return "12:00"


async def converse(model, *, until="", tools=(), settings=None):
    """Lets a realtime agent answer until its last text ends with `until`. Returns this text and all audio."""
    agent = RealtimeAgent(name="Clock", instructions="Be brief.", tools=list(tools))
    text, audio, has_ended = "", b"", False
    runner = RealtimeRunner(agent, config={"model_settings": {"model_name": model, **(settings or {})}})
    async with await runner.run(model_config={"url": REALTIME + model}) as session:
        await session.send_message("What time is it?")
        async for event in session:
            if event.type == "error":
                raise ValueError(event.error)
            if event.type == "audio":
                audio += event.audio.data
            if event.type == "history_updated":
                parts = [part for item in event.history[-1:] for part in getattr(item, "content", [])]
                text = "".join(getattr(part, "text", None) or getattr(part, "transcript", None) or "" for part in parts)
            has_ended |= event.type == "agent_end"
            if has_ended and text.endswith(until):
                return text, audio
    raise ConnectionError("the session ended")


async def realtime_tools():
    text, _ = await converse("scripted", tools=[read_clock], until="noon.", settings={"modalities": ["text"]})
    assert text == "It is noon."
    assert isinstance(ZONES.pop(), str)


async def realtime_speech():
    for model in ("speech", "omni"):
        _, audio = await converse(model)
        assert audio


async def voice_pipeline():
    agent = Agent(name="Clock", instructions="Be brief.", model="scripted")
    pipeline = VoicePipeline(workflow=SingleAgentVoiceWorkflow(agent))
    result = await pipeline.run(AudioInput(buffer=np.zeros(24_000, dtype=np.int16)))
    types = [event.type async for event in result.stream()]
    assert "voice_stream_event_audio" in types


run_features(realtime_tools, realtime_speech, voice_pipeline)
