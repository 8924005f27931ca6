"""Every mistake of mistakes.yaml is reported with its line and with the exact text."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.pipeline.files import SECTIONS, edited, errors


def _cases() -> Iterator[tuple[str, tuple[str, str, dict[str, Any]]]]:
    """Yields the text of a file, its error, and the arguments of `load_pipeline`, by the name of each mistake."""
    for section, content in SECTIONS.items():
        for name, mistake in content["mistakes"].items():
            edits = [text for each in mistake.get("edits", [mistake]) for text in (each["before"], each["after"])]
            text = edited(content["file"], *edits)
            yield f"{section}: {name}", (text, mistake["error"], content.get("arguments", {}))


CASES = dict(_cases())


@pytest.mark.parametrize(("text", "error", "arguments"), CASES.values(), ids=CASES)
def test_a_mistake_is_reported_with_its_line(tmp_path: Path, text: str, error: str, arguments: dict[str, Any]) -> None:
    assert error in errors(tmp_path, text, **arguments)
