"""An agent of livekit-agents converses by a gateway, with its plug-in for OpenAI's realtime API as it is."""

import asyncio
import json
import subprocess
from pathlib import Path

from stagemesh.v1.request_pb2 import ROLE_ASSISTANT, ROLE_SYSTEM, ROLE_TOOL, ROLE_USER
from tests.client.scripted import admitted, ended, finished, served
from tests.gateway.talking import CALL, conversing, written
from tests.repository.commands import ROOT

PYTHON = ROOT / ".venv" / "livekit" / "bin" / "python"
AGENT = Path(__file__).with_name("livekit_agent.py")


async def test_an_agent_calls_its_tool_and_answers() -> None:
    scripts = [admitted(), *CALL, ended("text"), finished()], written("It is noon."), written("You are welcome.")
    async with served() as orchestrator, conversing(orchestrator, *scripts) as url:
        command = [str(PYTHON), str(AGENT), f"http://{url}"]
        process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
        output, _ = await process.communicate()
        last = orchestrator.requests[-1].input.conversation.messages
    assert process.returncode == 0
    assert json.loads(output) == {
        "zones": ["Asia/Tokyo"],
        "texts": ["What time is it in Tokyo?", "It is noon.", "Thank you.", "You are welcome."],
    }
    roles = [ROLE_SYSTEM, ROLE_USER, ROLE_ASSISTANT, ROLE_TOOL, ROLE_ASSISTANT, ROLE_USER]
    assert [message.role for message in last] == roles
