"""Text as it comes, cut into sentences: each is let go as soon as what follows proves that it has ended."""

import codecs
import re
from collections.abc import Iterator, Sequence

import numpy as np
from hibari import Hibari

from stagemesh.connectors.edge import Packet

_OTHER_SPACE = re.compile(r"[^\S\n]")
_CLOSING = re.compile(r"([\"\u201d\u2019)\]]*)\s*")


class Sentences:
    """A `Transform` from text in any pieces to one sentence a packet; the sentences do not depend on the pieces."""

    def __init__(self) -> None:
        # A character may be cut in two between packets.
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._text = ""

    def push(self, packet: Packet) -> Sequence[Packet]:
        """See `Transform`."""
        self._text += _plain(self._decoder.decode(packet.tensors["text"].tobytes()))
        *ended, last = split(self._text) or [""]
        # The last one goes on, with the white space behind it, which may turn out to separate words.
        self._text = self._text[self._text.rindex(last) :]
        return [_packet(sentence) for sentence in ended]

    def finish(self) -> Sequence[Packet]:
        """See `Transform`."""
        text, self._text = self._text + _plain(self._decoder.decode(b"", final=True)), ""
        return [_packet(sentence) for sentence in split(text)]


def split(text: str) -> list[str]:
    """The sentences of `text` by hibari's rules, with the quotes and brackets that close them, which hibari drops."""
    return list(_closed(text, Hibari.split_sentences(text)))


def _closed(text: str, sentences: Sequence[str]) -> Iterator[str]:
    start = len(text) - len(text.lstrip())
    for sentence in sentences:
        closing = _CLOSING.match(text, start + len(sentence))
        assert closing is not None, "the pattern matches nothing too"
        yield text[start : closing.end(1)]
        start = closing.end()


def _plain(text: str) -> str:
    # hibari looks for a title before a full stop back to a space; a tab would let it see into the sentence before,
    # which is gone where it came in an earlier packet.
    return _OTHER_SPACE.sub(" ", text)


def _packet(sentence: str) -> Packet:
    return Packet({"text": np.frombuffer(sentence.encode(), np.uint8)})
