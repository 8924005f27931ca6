"""Draws recorded terminals as one SVG that plays them with CSS alone, in a loop."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

COLUMNS = 94
_CHARACTER, _LINE, _SIZE, _MARGIN, _BAR = 8.4, 20, 14, 16, 28
"""The width of a character, the height of a line, the size of the font, the margin, and the height of a title."""
_HOLD_S = 8.0
"""The time for which the last image remains before the recording starts again."""
_STYLE = f"""\
text {{ font: {_SIZE}px ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; fill: #d8dee9 }}
.title {{ fill: #8b93a7 }}
.command {{ fill: #ffffff; font-weight: bold }}
.alarm {{ fill: #ff7b72; font-weight: bold }}
.resumed {{ fill: #7ee787 }}
.quiet {{ fill: #8b93a7 }}
"""


@dataclass(frozen=True)
class Piece:
    """A text that a terminal shows from `at_s` on. `style` is a class of the style sheet, or empty."""

    at_s: float
    text: str
    style: str = ""


@dataclass(frozen=True)
class Terminal:
    """A recorded terminal. Its pieces are in the order in which they appear, and may contain line feeds."""

    title: str
    pieces: Sequence[Piece]


def draw(terminals: Sequence[Terminal], *, label: str) -> str:
    """Returns an SVG with the terminals below each other. `label` describes it for readers who do not see it.

    A viewer that does not animate, or whose user prefers less motion, shows the end of the recording.
    """
    ends_s = max(piece.at_s for terminal in terminals for piece in terminal.pieces) + _HOLD_S
    body, times, top = list[str](), list[float](), 0
    for terminal in terminals:
        rows = list(_wrap(terminal.pieces))
        height = _BAR + _LINE * len(rows) + _MARGIN
        body += _frame(terminal.title, top, height)
        for number, row in enumerate(rows):
            column = 0
            for piece in row:
                shown = piece.text.strip()
                if shown:
                    x = _MARGIN + _CHARACTER * (column + len(piece.text) - len(piece.text.lstrip()))
                    y = top + _BAR + _LINE * (number + 1) - 5
                    body.append(_text(piece, shown, x, y, _index(times, piece.at_s)))
                column += len(piece.text)
        top += height + _MARGIN // 2
    width = round(2 * _MARGIN + _CHARACTER * COLUMNS)
    size = f'width="{width}" height="{top}" viewBox="0 0 {width} {top}"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{escape(label)}">',
            f"<title>{escape(label)}</title>",
            f"<style>\n{_STYLE}{_animate(times, ends_s)}</style>",
            *body,
            "</svg>\n",
        ]
    )


def _wrap(pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
    """Yields the rows of a terminal, broken at spaces. Each row has the parts of pieces that it shows."""
    characters = [(char, piece) for piece in pieces for char in piece.text]
    start = 0
    while start < len(characters):
        text = "".join(char for char, _ in characters[start : start + COLUMNS + 1])
        end = text.find("\n")
        if end < 0:
            end = text.rfind(" ") if len(text) > COLUMNS else len(text)
        end = end if end >= 0 else COLUMNS
        yield _join(characters[start : start + end])
        start += end + (text[end : end + 1] in {" ", "\n"})


def _join(characters: Sequence[tuple[str, Piece]]) -> list[Piece]:
    row: list[Piece] = []
    previous: Piece | None = None
    for char, piece in characters:
        if piece is previous:
            row[-1] = Piece(piece.at_s, row[-1].text + char, piece.style)
        else:
            row.append(Piece(piece.at_s, char, piece.style))
        previous = piece
    return row


def _frame(title: str, top: int, height: int) -> Iterator[str]:
    width = round(2 * _MARGIN + _CHARACTER * COLUMNS)
    yield f'<rect y="{top}" width="{width}" height="{height}" rx="8" fill="#161b22"/>'
    yield f'<text class="title" x="{_MARGIN}" y="{top + 20}">{escape(title)}</text>'


def _text(piece: Piece, shown: str, x: float, y: int, time: int) -> str:
    """Returns an element with a fixed width, so that the columns do not depend on the viewer's fonts."""
    width = f'textLength="{_CHARACTER * len(shown):.1f}"'
    style = f"{piece.style} t{time}".strip()
    # A viewer collapses several spaces, but not no-break spaces.
    content = escape(shown.replace("  ", "\N{NO-BREAK SPACE}\N{NO-BREAK SPACE}"))
    return f'<text class="{style}" x="{x:.1f}" y="{y}" {width}>{content}</text>'


def _index(times: list[float], at_s: float) -> int:
    """Returns the number of the time at which an element appears, in steps of 50 ms."""
    rounded = round(at_s * 20) / 20
    if rounded not in times:
        times.append(rounded)
    return times.index(rounded)


def _animate(times: Sequence[float], ends_s: float) -> str:
    """Returns a rule for each time: its elements are hidden before it."""
    rules = [f"text {{ animation: {ends_s:.1f}s step-end infinite }}"]
    for number, at_s in enumerate(times):
        if at_s > 0:
            share = f"{100 * at_s / ends_s:.2f}%"
            rules.append(f".t{number} {{ animation-name: k{number} }}")
            rules.append(f"@keyframes k{number} {{ 0% {{ visibility: hidden }} {share} {{ visibility: visible }} }}")
    rules.append("@media (prefers-reduced-motion: reduce) { text { animation: none } }")
    return "\n".join(rules) + "\n"
