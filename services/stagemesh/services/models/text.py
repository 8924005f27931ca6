"""The transforms that process text, with their descriptors."""

import codecs
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from stagemesh.common.descriptors import TransformDescriptor
from stagemesh.common.tensors import TensorSpec
from stagemesh.connectors.edge import Packet

_TEXT = {"text": TensorSpec("uint8", ("bytes",))}
_OTHER_SPACE = re.compile(r"[^\S\n]")
_CLOSING = re.compile(r"([\"\u201d\u2019)\]]*)\s*")

SENTENCES = TransformDescriptor(takes=_TEXT, gives=_TEXT, factory="stagemesh.services.models.text:Sentences")


class Sentences:
    """A `Transform` that splits text into sentences. Each output packet contains one sentence.

    Emits a sentence as soon as the next sentence has started. The sentences do not depend on how the text is divided
    into packets.
    """

    def __init__(self, model: Path | None = None) -> None:  # noqa: ARG002  # the rules are the same for all models
        from hibari import Hibari

        self._split_sentences = Hibari.split_sentences
        # A UTF-8 character may be split between two packets.
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._text = ""

    def push(self, packet: Packet) -> Sequence[Packet]:
        self._text += _plain(self._decoder.decode(packet.tensors["text"].tobytes()))
        *ended, last = self._split() or [""]
        # The last sentence may continue. The white space after it is retained, because it may separate words.
        self._text = self._text[self._text.rindex(last) :]
        return [_packet(sentence) for sentence in ended]

    def finish(self) -> Sequence[Packet]:
        self._text += _plain(self._decoder.decode(b"", final=True))
        return [_packet(sentence) for sentence in self._split()]

    def _split(self) -> list[str]:
        """Splits the buffered text into sentences by hibari's rules.

        Retains closing quotes and brackets at the end of a sentence, which hibari drops.
        """
        return list(_closed(self._text, self._split_sentences(self._text)))


def _closed(text: str, sentences: Sequence[str]) -> Iterator[str]:
    start = len(text) - len(text.lstrip())
    for sentence in sentences:
        closing = _CLOSING.match(text, start + len(sentence))
        assert closing is not None, "the pattern matches the empty string"
        yield text[start : closing.end(1)]
        start = closing.end()


def _plain(text: str) -> str:
    # hibari searches for a title from a full stop back to a space. With a tab it would read into the previous sentence,
    # which is not available if it arrived in an earlier packet.
    return _OTHER_SPACE.sub(" ", text)


def _packet(sentence: str) -> Packet:
    return Packet({"text": np.frombuffer(sentence.encode(), np.uint8)})
