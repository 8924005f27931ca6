"""The transcript of a session: the messages of the turns that have ended."""

from collections.abc import Sequence
from dataclasses import dataclass

from stagemesh.v1 import request_pb2


@dataclass(frozen=True, slots=True)
class TranscriptTurn:
    """A turn that has ended: the messages of its input, as a serialized Conversation, and its answer."""

    messages: bytes
    answer: str

    @property
    def size_bytes(self) -> int:
        """The number of bytes of the messages and the answer."""
        return len(self.messages) + len(self.answer.encode())


class Transcript:
    """The conversation of a session so far: the opening, and the turns that have ended.

    All messages are serialized, because a parsed message needs several times as much memory. Serialized messages of
    protobuf can be joined.
    """

    __slots__ = ("_opening", "_turns", "size_bytes")

    def __init__(self, opening: bytes = b"") -> None:
        """`opening` is the conversation before the first turn, serialized."""
        self._opening = opening
        self._turns: list[TranscriptTurn] = []
        self.size_bytes = len(self._opening)
        """The number of bytes of all messages."""

    def add(self, turn: TranscriptTurn) -> None:
        """Adds the newest turn."""
        self._turns.append(turn)
        self.size_bytes += turn.size_bytes

    def pop(self) -> TranscriptTurn:
        """Removes and returns the newest turn."""
        turn = self._turns.pop()
        self.size_bytes -= turn.size_bytes
        return turn

    def conversation(self, messages: bytes) -> request_pb2.Conversation:
        """Returns the conversation that ends with the messages of a further turn."""
        answered = (turn.messages + _serialize_answer(turn.answer) for turn in self._turns)
        return request_pb2.Conversation.FromString(b"".join((self._opening, *answered, messages)))


def serialize_messages(messages: Sequence[request_pb2.Message]) -> bytes:
    """Returns messages as a serialized Conversation."""
    return request_pb2.Conversation(messages=messages).SerializeToString()


def restored_turn(messages: Sequence[request_pb2.Message]) -> TranscriptTurn:
    """Returns the turn that consists of these messages. The last message is its answer if the model is its author."""
    last = messages[-1] if messages else request_pb2.Message()
    if last.role != request_pb2.ROLE_ASSISTANT or last.tool_calls or last.parts:
        return TranscriptTurn(serialize_messages(messages), "")
    return TranscriptTurn(serialize_messages(messages[:-1]), last.content)


def _serialize_answer(answer: str) -> bytes:
    # A message without text is added, too, because some chat templates reject two messages of the user in a row.
    return serialize_messages([request_pb2.Message(role=request_pb2.ROLE_ASSISTANT, content=answer)])
