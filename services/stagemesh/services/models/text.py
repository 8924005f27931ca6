"""The transforms that process text, with their descriptors."""

import codecs
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from stagemesh.common.plugins.descriptors import TransformDescriptor
from stagemesh.common.wire.tensors import TensorSpec
from stagemesh.connectors.packets import Packet

_TEXT = {"text": TensorSpec("uint8", ("bytes",))}
_OTHER_SPACE = re.compile(r"[^\S\n]")
_SPACE = re.compile(r"\s+")
_CLOSING = r"[\"\u201d\u2019)\]]*"
_SENTENCE_END = re.compile(rf"[.!?\u2026]{_CLOSING}\Z")
_CLAUSE_END = re.compile(rf"[,;:\u2014]{_CLOSING}\Z")
_ORDINARY_WORD = re.compile(r"[(\[\"\u201c'\u2018]*([^\W\d_](?:[^\W\d_]|['\u2019-])*[^\W\d_])(?:\.|[!?]+)")
_ABBREVIATION = re.compile(
    "al|approx|apt|apr|assn|aug|ave|bldg|blvd|bros|ca|cf|cm|co|corp|dec|dept|ed|eds|esp|est|etc|feb|figs?|fri|ft|govt|"
    "hrs?|hwy|inc|jan|jr|jul|jun|kg|km|lbs?|ltd|mar|max|mg|mi|mins?|misc|ml|mm|mt|nov|oct|oz|pkwy|pl|pp|rd|resp|secs?|"
    "sept?|sq|sr|ste?|tel|thu|thurs?|tues?|univ|viz|vols?|vs|wed",
    re.IGNORECASE,
)
"""Abbreviations after which a sentence may continue with a word in lower case."""
_MIN_CLAUSE_CHARACTERS = 20
"""The length of the shortest clause: the speech of a shorter one is over before that of the next one has been made."""

SENTENCES = TransformDescriptor(takes=_TEXT, gives=_TEXT, factory="stagemesh.services.models.text:Sentences")
CLAUSES = TransformDescriptor(takes=_TEXT, gives=_TEXT, factory="stagemesh.services.models.text:Clauses")


class Sentences:
    """A `Transform` that splits text into sentences. Each output packet contains one sentence.

    A sentence ends with a line break, or with a full stop, a question mark, an exclamation mark or an ellipsis before
    white space. It is emitted as soon as the white space arrives. If the mark does not always end a sentence, as in
    "Dr. Smith" or "etc. and", hibari's rules decide as soon as the first character of the next word arrives. The
    sentences do not depend on how the text is divided into packets.
    """

    def __init__(self, model: Path | None = None) -> None:  # noqa: ARG002  # the rules are the same for all models
        from hibari import Hibari

        self._split_sentences = Hibari.split_sentences
        # A UTF-8 character may be split between two packets.
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._text = ""
        self._searched = 0
        """The number of characters of the buffered text in which no part ends."""

    def push(self, packet: Packet) -> Sequence[Packet]:
        self._text += _plain(self._decoder.decode(packet.tensors["text"].tobytes()))
        return [_packet(part) for part in self._complete_parts() if part]

    def finish(self) -> Sequence[Packet]:
        self._text += _plain(self._decoder.decode(b"", final=True))
        return [_packet(part) for part in [*self._complete_parts(), self._text.strip()] if part]

    def _complete_parts(self) -> list[str]:
        """Removes the parts that have ended from the buffered text, and returns them. A part may be empty."""
        parts = list[str]()
        start, searched = 0, len(self._text)
        for space in _SPACE.finditer(self._text, self._searched):
            begin, end = space.span()
            word = self._text[self._text.rfind(" ", start, begin) + 1 or start : begin]
            after = self._text[end : end + 1]
            ends = begin == start or "\n" in space[0] or self._ends_part(word, after, length=begin - start)
            if ends is None:
                searched = begin
            elif ends:
                parts.append(self._text[start:begin].rstrip())
                start = end
        self._text, self._searched = self._text[start:], searched - start
        return parts

    def _ends_part(self, word: str, after: str, *, length: int) -> bool | None:  # noqa: ARG002  # used by clauses
        """Returns whether a part ends with its `word`, which white space without a line break follows.

        `after` is the first character after the white space. If it has not arrived, `after` is empty, and None is
        returned if the decision depends on it. `length` is the length of the part.
        """
        if not _SENTENCE_END.search(word):
            return False
        if self._always_ends(word):
            return True
        return len(self._split_sentences(f"{word} {after}")) > 1 if after else None

    def _always_ends(self, word: str) -> bool:
        match = _ORDINARY_WORD.fullmatch(word)
        # hibari knows the titles.
        return match is not None and (
            not word.endswith(".")
            or (not _ABBREVIATION.fullmatch(match[1]) and len(self._split_sentences(f"{word} A")) > 1)
        )


class Clauses(Sentences):
    """A `Transform` that splits text into clauses. Each output packet contains one clause.

    A clause ends with the sentence, or with a comma, a semicolon, a colon or a dash before white space if it then has
    at least 20 characters. The clauses do not depend on how the text is divided into packets.
    """

    def _ends_part(self, word: str, after: str, *, length: int) -> bool | None:
        if length >= _MIN_CLAUSE_CHARACTERS and _CLAUSE_END.search(word):
            return True
        return super()._ends_part(word, after, length=length)


def _plain(text: str) -> str:
    # hibari searches for a title from a full stop back to a space, not to a tab.
    return _OTHER_SPACE.sub(" ", text)


def _packet(part: str) -> Packet:
    return Packet({"text": np.frombuffer(part.encode(), np.uint8)})
