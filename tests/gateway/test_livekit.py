"""An agent of livekit-agents converses by a gateway, with its plug-in for OpenAI's realtime API as it is."""

import asyncio
import json
import subprocess
from pathlib import Path

from stagemesh.v1 import request_pb2
from tests.client.scripted import Script, admitted, ended, finished, served, text
from tests.gateway.test_realtime import CALL, conversing
from tests.repository.commands import ROOT

PYTHON = ROOT / ".venv" / "livekit" / "bin" / "python"
AGENT = Path(__file__).with_name("livekit_agent.py")


def said(words: str) -> Script:
    """Returns a script that answers with these words."""
    return [admitted(), text(words), ended("text"), finished()]


async def test_an_agent_calls_its_tool_and_answers() -> None:
    scripts = said(CALL), said("It is noon."), said("You are welcome.")
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
    assert [message.role for message in last] == [
        request_pb2.ROLE_SYSTEM,
        request_pb2.ROLE_USER,
        request_pb2.ROLE_ASSISTANT,
        request_pb2.ROLE_TOOL,
        request_pb2.ROLE_ASSISTANT,
        request_pb2.ROLE_USER,
    ]
