"""docs/gateway-parameters.md lists the parameters that the gateway accepts, and no others."""

import re

import pytest

from stagemesh.gateway.body import Body, SamplingBody, StageBody
from stagemesh.gateway.routes.chat import ChatBody
from stagemesh.gateway.routes.completions import CompletionBody
from stagemesh.gateway.routes.images import ImageBody
from stagemesh.gateway.routes.speech import SpeechBody
from stagemesh.gateway.routes.transcriptions import TranscriptionBody
from stagemesh.gateway.routes.videos import VideoBody
from stagemesh.gateway.routes.voices import CreateVoiceBody
from tests.repository.commands import ROOT


def listed(section: str) -> set[str]:
    """Returns the names in the first column of a section's table."""
    page = (ROOT / "docs/gateway-parameters.md").read_text()
    rows = re.findall(r"^\| (`[^|]+) \|", page.partition(f"## {section}\n")[2].partition("\n## ")[0], re.MULTILINE)
    return {name for row in rows for name in re.findall(r"`(\w+)`", row)}


@pytest.mark.parametrize(
    ("section", "body", "others", "files"),
    [
        ("All endpoints that generate", StageBody, Body, set()),
        ("Sampling", SamplingBody, StageBody, set()),
        ("Chat", ChatBody, SamplingBody, set()),
        ("Completions", CompletionBody, SamplingBody, set()),
        ("Speech", SpeechBody, StageBody, set()),
        ("Created voices", CreateVoiceBody, Body, {"audio_sample"}),
        ("Transcriptions", TranscriptionBody, SamplingBody, {"file"}),
        ("Images", ImageBody, StageBody, set()),
        ("Videos", VideoBody, StageBody, set()),
    ],
)
def test_a_section_lists_its_parameters(section: str, body: type[Body], others: type[Body], files: set[str]) -> None:
    assert listed(section) == body.model_fields.keys() - others.model_fields.keys() | files
