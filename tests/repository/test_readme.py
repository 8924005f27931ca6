import re

import pytest

from tests.repository.code_blocks import DOCUMENTS
from tests.repository.commands import ROOT

COMMAND = re.compile(r"(?:`|^ {4})make ([a-z][a-z0-9-]*)", re.MULTILINE)
LINK = re.compile(r"\]\((?!https?:)([^)#]+)")


@pytest.mark.parametrize("path", ["examples/speak.py", "pipeline/stagemesh/pipeline/built_in/speech.yaml"])
def test_the_quick_start_contains_files_verbatim(path: str) -> None:
    assert f"\n{(ROOT / path).read_text()}```" in (ROOT / "docs/quick-start.md").read_text()


@pytest.mark.parametrize("document", [*DOCUMENTS, "CHANGELOG.md"])
def test_links_have_targets(document: str) -> None:
    path = ROOT / document
    assert [link for link in LINK.findall(path.read_text()) if not (path.parent / link).exists()] == []


@pytest.mark.parametrize("document", [*DOCUMENTS, "CHANGELOG.md"])
def test_commands_in_documents_exist(document: str) -> None:
    named = set(COMMAND.findall((ROOT / document).read_text()))
    assert named <= set(re.findall(r"^([a-z][a-z0-9-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
