"""An agent of livekit-agents, which runs in an environment of its own.

Calls a gateway by its unchanged plug-in for OpenAI's realtime API, and prints what happened as JSON.
"""

# mypy: ignore-errors
# The packages of livekit are not installed where mypy runs.
import asyncio
import json
import sys

from livekit.agents import Agent, AgentSession, function_tool
from livekit.plugins import openai


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


async def main(url: str) -> None:
    """Holds a conversation of two turns with the gateway at a URL."""
    model = openai.realtime.RealtimeModel(model="p", base_url=f"{url}/v1", api_key="none", modalities=["text"])
    agent = Clock()
    async with AgentSession(llm=model) as session:
        await session.start(agent)
        await session.run(user_input="What time is it in Tokyo?")
        await session.run(user_input="Thank you.")
        texts = [item.text_content for item in session.history.items if item.type == "message"]
        print(json.dumps({"zones": agent.zones, "texts": texts}))


asyncio.run(main(sys.argv[1]))
