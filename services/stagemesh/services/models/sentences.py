"""Text as it comes, cut into sentences: each is let go as soon as what follows proves that it has ended."""

import codecs
from collections.abc import Sequence

import numpy as np
from hibari import Hibari

from stagemesh.connectors.base import Packet


class Sentences:
    """A `Transform` from text in any pieces to one sentence a packet; the sentences do not depend on the pieces."""

    def __init__(self) -> None:
        # A character may be cut in two between packets.
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._text = ""

    def push(self, packet: Packet) -> Sequence[Packet]:
        """See `Transform`."""
        self._text += self._decoder.decode(packet.tensors["text"].tobytes())
        *ended, last = Hibari.split_sentences(self._text) or [""]
        # The last one goes on, with the white space behind it, which may turn out to separate words.
        self._text = self._text[self._text.rfind(last) :] if last else ""
        return [_packet(sentence) for sentence in ended]

    def finish(self) -> Sequence[Packet]:
        """See `Transform`."""
        text, self._text = self._text + self._decoder.decode(b"", final=True), ""
        return [_packet(sentence) for sentence in Hibari.split_sentences(text)]


def _packet(sentence: str) -> Packet:
    return Packet({"text": np.frombuffer(sentence.encode(), np.uint8)})
