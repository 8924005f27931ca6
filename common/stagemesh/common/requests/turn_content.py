"""The content of a turn: input that becomes part of a prompt, and an answer of which the user has heard a part."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from stagemesh.common.wire.tensors import rows_of
from stagemesh.v1 import orchestrator_pb2, request_pb2


class PromptInput:
    """The pieces of an open turn, in the order in which the client appended them.

    Times are in seconds in the audio of the session. Only audio samples have a known duration.
    """

    __slots__ = ("_pieces", "begins_s", "ends_s", "size_bytes")

    def __init__(self, begins_s: float = 0.0) -> None:
        self._pieces: list[orchestrator_pb2.InputAppend] = []
        self.size_bytes = 0
        """The total size of the pieces."""
        self.begins_s = self.ends_s = begins_s
        """The times at which the input's audio begins and ends."""

    @property
    def pieces(self) -> Sequence[orchestrator_pb2.InputAppend]:
        """The pieces, oldest first."""
        return self._pieces

    def append(self, piece: orchestrator_pb2.InputAppend) -> None:
        """Adds a piece."""
        self._pieces.append(piece)
        self.size_bytes += size_of(piece)
        self.ends_s += duration_s(piece)

    def messages(self) -> list[request_pb2.Message]:
        """Returns the messages that the pieces form.

        Consecutive parts form one message of the user. Consecutive texts are joined, and so are audio samples with the
        same rate and number of channels.
        """
        messages: list[request_pb2.Message] = []
        for kind, pieces in groupby(self._pieces, key=lambda piece: piece.WhichOneof("piece")):
            if kind == "message":
                messages += [piece.message for piece in pieces]
            else:
                messages.append(_user_message([piece.part for piece in pieces]))
        return messages

    def split(self, at_s: float) -> "PromptInput":
        """Removes and returns the audio after a time, together with the other pieces that follow it."""
        pieces, clock_s = self._pieces, self.begins_s
        rest = PromptInput(min(max(at_s, self.begins_s), self.ends_s))
        self._pieces, self.size_bytes, self.ends_s = [], 0, self.begins_s
        for piece in pieces:
            length_s = duration_s(piece)
            if clock_s + length_s <= at_s:
                self.append(piece)
            elif clock_s >= at_s:
                rest.append(piece)
            else:
                first, second = _halves(piece, at_s - clock_s)
                self.append(first)
                rest.append(second)
            clock_s += length_s
        return rest

    def drop_audio(self, *, until_s: float) -> None:
        """Drops the audio before a time. Retains all pieces that are not audio samples."""
        if until_s <= self.begins_s:
            return
        rest = self.split(until_s)
        kept = [piece for piece in self._pieces if not duration_s(piece)]
        self._pieces, self.size_bytes, self.begins_s = [], 0, rest.begins_s
        self.ends_s = self.begins_s
        for piece in (*kept, *rest.pieces):
            self.append(piece)


def size_of(piece: orchestrator_pb2.InputAppend) -> int:
    """Returns the number of bytes for which a piece counts: those of its text, its samples, its file or its message."""
    if piece.WhichOneof("piece") == "message":
        return piece.message.ByteSize()
    match piece.part.WhichOneof("content"):
        case "text":
            return len(piece.part.text.encode())
        case "audio":
            return len(piece.part.audio.samples.inline)
        case "image" | "audio_file" | "video_file" as kind:
            return len(getattr(piece.part, kind).data)
        case None:
            return 0


def duration_s(piece: orchestrator_pb2.InputAppend) -> float:
    """Returns the duration of a piece that consists of audio samples, in seconds, and 0 for any other piece."""
    audio = piece.part.audio
    return audio.samples.shape[0] / audio.sample_rate_hz if audio.sample_rate_hz and audio.samples.shape else 0.0


def _user_message(parts: Sequence[request_pb2.Part]) -> request_pb2.Message:
    joined = list(_joined(parts))
    if len(joined) == 1 and joined[0].HasField("text"):
        return request_pb2.Message(role=request_pb2.ROLE_USER, content=joined[0].text)
    return request_pb2.Message(role=request_pb2.ROLE_USER, parts=joined)


def _joined(parts: Iterable[request_pb2.Part]) -> Iterator[request_pb2.Part]:
    for (kind, *_), group in groupby(parts, key=_joining_key):
        same = list(group)
        if kind == "text":
            yield request_pb2.Part(text="".join(part.text for part in same))
        elif kind == "audio":
            yield request_pb2.Part(audio=_joined_audio([part.audio for part in same]))
        else:
            yield from same


def _joining_key(part: request_pb2.Part) -> tuple[object, ...]:
    kind = part.WhichOneof("content")
    if kind != "audio":
        return (kind,)
    samples = part.audio.samples
    return kind, part.audio.sample_rate_hz, samples.dtype, *samples.shape[1:]


def _joined_audio(pieces: Sequence[request_pb2.Audio]) -> request_pb2.Audio:
    joined = request_pb2.Audio(sample_rate_hz=pieces[0].sample_rate_hz)
    joined.samples.dtype = pieces[0].samples.dtype
    joined.samples.shape.extend((sum(each.samples.shape[0] for each in pieces), *pieces[0].samples.shape[1:]))
    joined.samples.inline = b"".join(each.samples.inline for each in pieces)
    return joined


def _halves(
    piece: orchestrator_pb2.InputAppend, at_s: float
) -> tuple[orchestrator_pb2.InputAppend, orchestrator_pb2.InputAppend]:
    """Divides a piece of audio samples at a time since its begin."""
    audio = piece.part.audio
    middle = round(at_s * audio.sample_rate_hz)
    return _rows(audio, 0, middle), _rows(audio, middle, audio.samples.shape[0])


def _rows(audio: request_pb2.Audio, begin: int, end: int) -> orchestrator_pb2.InputAppend:
    samples = rows_of(audio.samples, begin, end)
    part = request_pb2.Part(audio=request_pb2.Audio(samples=samples, sample_rate_hz=audio.sample_rate_hz))
    return orchestrator_pb2.InputAppend(part=part)


def shorten(answer: str, *, length: int) -> str:
    """Returns the first `length` characters of an answer, without a word that is cut in the middle."""
    if length >= len(answer):
        return answer
    heard = answer[:length]
    if not answer[length].isspace():
        cut = max((index for index, character in enumerate(heard) if character.isspace()), default=0)
        heard = heard[:cut]
    return heard.rstrip()
