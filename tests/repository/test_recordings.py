"""The recording of a terminal in docs/, and the SVG in which terminals are drawn."""

import re
from html import unescape

import pytest

from tests.repository.commands import ROOT
from tools.recordings.terminal_svg import COLUMNS, Piece, Terminal, draw


def lines(svg: str) -> list[str]:
    """Returns the texts of an SVG by the line on which they are drawn."""
    found: dict[str, str] = {}
    for y, text in re.findall(r'y="(\d+)"[^>]*>([^<]*)</text>', svg):
        found[y] = f"{found.get(y, '')}{unescape(text)} "
    return [text.strip().replace("\N{NO-BREAK SPACE}", " ") for text in found.values()]


def test_pieces_are_drawn_in_lines() -> None:
    pieces = [Piece(0, "$ say\n", "command"), Piece(1, "one "), Piece(2, "two <3\n"), Piece(3, "a  b")]
    assert lines(draw([Terminal("shell", pieces)], label="Words")) == ["shell", "$ say", "one two <3", "a  b"]


def test_a_long_line_is_broken_at_a_space() -> None:
    drawn = lines(draw([Terminal("shell", [Piece(0, "word " * 30)])], label="Words"))
    assert all(len(line) <= COLUMNS for line in drawn)
    assert sum(line.count("word") for line in drawn) == 30


@pytest.mark.parametrize("at_s", [0.0, 2.0])
def test_a_piece_is_hidden_before_its_time(at_s: float) -> None:
    svg = draw([Terminal("shell", [Piece(at_s, "now")])], label="Words")
    assert re.findall(r"hidden \} ([0-9.]+%)", svg) == ([f"{100 * at_s / (at_s + 8):.2f}%"] if at_s else [])


def test_the_recording_loads_nothing() -> None:
    svg = (ROOT / "docs/recovery.svg").read_text()
    assert not re.search(r"href|url\(|@import|<script|<image", svg)
    assert "the same bytes" in lines(svg)
