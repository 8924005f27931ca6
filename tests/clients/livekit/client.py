"""livekit-agents with its plug-in for OpenAI: agents over chat, responses and realtime, speech and transcription."""

import os

from features import run_features
from livekit import rtc
from livekit.agents import Agent, AgentSession, function_tool, utils
from livekit.plugins import openai

URL = os.environ["OPENAI_BASE_URL"]


class Clock(Agent):
    """An agent with a tool. `zones` are the arguments of its calls."""

    def __init__(self) -> None:
        super().__init__(instructions="Answer briefly.")
        self.zones: list[str] = []

    @function_tool
    async def read_clock(self, zone: str) -> str:
        """Returns the time in a zone."""
        self.zones.append(zone)
        return "12:00"


async def converse(model):
    """Holds a conversation of two turns, each with a call of the tool, and checks it."""
    agent = Clock()
    async with AgentSession(llm=model) as session:
        await session.start(agent)
        await session.run(user_input="What time is it?")
        await session.run(user_input="And now?")
        texts = [item.text_content for item in session.history.items if item.type == "message"]
    assert texts == ["What time is it?", "It is noon.", "And now?", "It is noon."], texts
    assert len(agent.zones) == 2
    assert all(isinstance(zone, str) for zone in agent.zones)


async def llm():
    await converse(openai.LLM(model="scripted"))


async def responses():
    await converse(openai.responses.LLM(model="scripted", use_websocket=False))


async def responses_over_a_websocket():
    async with utils.http_context.open():
        await converse(openai.responses.LLM(model="scripted", base_url=f"{URL}/responses"))


async def tts():
    async with openai.TTS() as speech:
        frame = await speech.synthesize("The sea is calm.").collect()
    assert frame.duration > 0.2


async def stt():
    silence = rtc.AudioFrame(bytes(32_000), 16_000, 1, 16_000)
    event = await openai.STT().recognize(silence)
    assert isinstance(event.alternatives[0].text, str)


async def realtime_tools():
    await converse(openai.realtime.RealtimeModel(model="scripted", base_url=URL, modalities=["text"]))


async def realtime_speech():
    for name in ("speech", "omni"):
        session = openai.realtime.RealtimeModel(model=name, base_url=URL).session()
        await session.update_instructions("Answer briefly.")
        generation = await session.generate_reply(instructions="Say hello.")
        async for message in generation.message_stream:
            assert sum([frame.duration async for frame in message.audio_stream]) > 0
        await session.aclose()


run_features(llm, responses, responses_over_a_websocket, tts, stt, realtime_tools, realtime_speech)
