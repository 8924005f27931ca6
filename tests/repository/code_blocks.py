"""The code blocks of the documents, and the commands in them."""

import itertools
import re
import shlex
from collections.abc import Iterator
from typing import NamedTuple

from markdown_it import MarkdownIt

from tests.repository.commands import ROOT

DOCUMENTS = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in ("*.md", "docs/*.md", "clients/*/README.md", "examples/*/README.md")
    for path in ROOT.glob(pattern)
    if path.name != "CHANGELOG.md"
)
FRAGMENT = "<!-- fragment -->"
"""A comment before a block of YAML or Python that is incomplete on purpose."""
_SHELLS = {"", "text", "bash", "sh"}
_COMMAND = re.compile(r"(?:^|[ /])stagemesh (?=[a-z-])")
_REDIRECTION = re.compile(r" \d?> ?\S+")


class Block(NamedTuple):
    """A code block. `line` is the number of its first line in the document. `language` is empty if it is indented."""

    document: str
    line: int
    language: str
    is_fragment: bool
    code: str

    def __str__(self) -> str:
        return f"{self.document}:{self.line}"


def find_blocks(*languages: str) -> list[Block]:
    """Returns the blocks of all documents in some languages, in the order of the documents."""
    return [block for document in DOCUMENTS for block in read_blocks(document) if block.language in languages]


def read_blocks(document: str) -> Iterator[Block]:
    """Yields all code blocks of a document."""
    previous = ""
    for token in MarkdownIt("commonmark").parse((ROOT / document).read_text()):
        if token.type in {"fence", "code_block"}:
            assert token.map is not None
            is_fragment = previous == FRAGMENT
            yield Block(document, token.map[0] + 1, token.info.partition(" ")[0], is_fragment, token.content)
        if token.content:
            previous = token.content.strip()


def find_commands() -> Iterator[tuple[str, list[str]]]:
    """Yields the commands `stagemesh …` of all documents, in code blocks and in text: their places and their words."""
    for document in DOCUMENTS:
        for block in read_blocks(document):
            if block.language in _SHELLS:
                lines = block.code.replace("\\\n", " ").splitlines()
                yield from ((str(block), words) for line in lines for words in _commands(line))
        text = (ROOT / document).read_text()
        for code in re.findall(r"(?<!`)`(stagemesh [^`]+)`(?!`)", text):
            for words in _commands(" ".join(code.split())):
                # A text may omit the value of the last option.
                yield document, [*words, "VALUE"] if words[-1].startswith("--") else words


def _commands(line: str) -> Iterator[list[str]]:
    """Yields the words after `stagemesh` of each command in a line, up to its end, without redirections."""
    for match in _COMMAND.finditer(line):
        lexer = shlex.shlex(_REDIRECTION.sub("", line[match.end() :]), posix=True, punctuation_chars="|;&")
        lexer.whitespace_split = True
        yield list(itertools.takewhile(lambda word: word[0] not in "|;&", lexer))
