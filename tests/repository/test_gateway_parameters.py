"""docs/gateway-parameters.md lists the parameters that the gateway applies, ignores and refuses, and no others."""

import json
import re
from collections.abc import Iterator
from itertools import groupby
from operator import itemgetter

import pytest

from stagemesh.gateway.body import Body, SamplingBody, StageBody
from stagemesh.gateway.parameters import RULES
from stagemesh.gateway.responses.body import ResponseBody
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
        ("Responses", ResponseBody, SamplingBody, {"n"}),
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


def rows() -> Iterator[str]:
    """Yields the lines of the table of rules."""
    for section, rules in RULES.items():
        for rule, group in groupby(sorted(rules.items(), key=lambda item: repr(item[1])), key=itemgetter(1)):
            names = ", ".join(f"`{name}`" for name, _ in group)
            neutral = ", ".join(f"`{json.dumps(value)}`" for value in rule.neutral)
            remedy = "" if rule.remedy == "omit it" else f"; {rule.remedy}"
            yield f"| {section} | {names} | {rule.effect}{remedy} | {neutral} |"


def test_the_table_of_rules_is_that_of_the_code() -> None:
    page = (ROOT / "docs/gateway-parameters.md").read_text()
    table = page.partition("| where | parameter | effect | values without effect |\n|---|---|---|---|\n")[2]
    # Replace the lines of the page by these.
    assert table.partition("\n\n")[0].splitlines() == list(rows())
