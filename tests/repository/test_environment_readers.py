import re

from tests.repository.commands import ROOT, SOURCES

SETTINGS = ROOT / "common/stagemesh/common/process/settings.py"
READERS = re.compile(r"\bos\.(environb?|getenvb?|putenv|unsetenv)\b|from os import .*\b(environb?|getenvb?)\b")


def test_only_settings_reads_the_environment() -> None:
    readers = [
        f"{path.relative_to(ROOT)}:{number}"
        for source in SOURCES
        for path in (ROOT / source / "stagemesh").rglob("*.py")
        if path != SETTINGS
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if READERS.search(line)
    ]
    assert readers == []


def test_the_search_finds_a_reader() -> None:
    assert any(READERS.search(line) for line in SETTINGS.read_text().splitlines())
