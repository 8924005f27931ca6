"""Lists in the form that Python-Markdown reads.

The documents indent the content of a list item to the item's text, as CommonMark requires. Python-Markdown requires
four spaces for each level, and a blank line before a list.
"""

import re
from typing import NamedTuple

from markdown_it import MarkdownIt

_MARKER = re.compile(r"([-*+]|\d+[.)]) +")
_INDENT = 4


class _Item(NamedTuple):
    """A list item: its first line, the line after its last one, and the column of its text.

    `is_separate` says whether Python-Markdown needs a blank line before the item.
    """

    start: int
    end: int
    column: int
    is_separate: bool


def indent_lists(markdown: str) -> str:
    """Returns the document with four spaces for each level of a list, and with blank lines before lists and items.

    Blank lines are inserted before a list, unless it is a part of a list without blank lines, and between items that
    contain blank lines themselves.
    """
    lines = markdown.splitlines()
    items = _find_items(markdown, lines)
    separate = {item.start for item in items if item.is_separate}
    result: list[str] = []
    for number, line in enumerate(lines):
        if number in separate and result and result[-1].strip():
            result.append("")
        result.append(_indented(line, number, [item for item in items if item.start <= number < item.end]))
    return "\n".join(result) + "\n"


def _find_items(markdown: str, lines: list[str]) -> list[_Item]:
    """Returns the items of all lists, outer ones first."""
    items: list[_Item] = []
    for token in MarkdownIt("commonmark").parse(markdown):
        if token.type != "list_item_open" or token.map is None:
            continue
        start, end = token.map
        outer = [item for item in items if item.start <= start < item.end]
        before = [item for item in items if item.end == start]
        column = outer[-1].column if outer else 0
        marker = _MARKER.match(lines[start], column + _indent_of(lines[start][column:]))
        is_separate = any(_has_blank(lines, item) for item in (before or outer[-1:])) or not (before or outer)
        items.append(_Item(start, end, marker.end() if marker else column, is_separate))
    return items


def _has_blank(lines: list[str], item: _Item) -> bool:
    return any(not line.strip() for line in lines[item.start : item.end])


def _indented(line: str, number: int, items: list[_Item]) -> str:
    if not items or not line.strip():
        return line
    *outer, inner = items
    if number != inner.start:
        # A paragraph may continue on a line with a smaller indentation.
        kept = line[inner.column :] if not line[: inner.column].strip() else line.lstrip()
        return " " * _INDENT * len(items) + kept
    marker = line[outer[-1].column if outer else 0 : inner.column].strip()
    return " " * _INDENT * len(outer) + marker.ljust(_INDENT) + line[inner.column :]


def _indent_of(text: str) -> int:
    return len(text) - len(text.lstrip())
