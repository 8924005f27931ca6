"""The input of the open turn: its checks, its pieces, and the credit that limits them."""

from collections.abc import Callable, Sequence

from stagemesh.common.errors import InvalidRequestError, OverloadedError, UnsupportedError
from stagemesh.common.requests.turn_content import PromptInput, duration_s, size_of
from stagemesh.common.wire.versions import refuse_unknown
from stagemesh.connectors.packets import Packet
from stagemesh.orchestrator.request.streamed_input import StreamedInput, packets_of
from stagemesh.orchestrator.session.settings import SessionSettings
from stagemesh.rpc.channels import MAX_MESSAGE_BYTES
from stagemesh.v1 import orchestrator_pb2

PROMPT_WINDOW_BYTES, STREAM_WINDOW_BYTES = 2 * MAX_MESSAGE_BYTES, 1 << 20
"""The bytes that may be appended ahead of their consumption. The limit rises at half of them, where any piece fits."""
HEARD_KINDS = frozenset({"audio"})
"""The kinds of input in which turns are detected."""
_LARGEST_PROMPT_BYTES = MAX_MESSAGE_BYTES - (256 << 10)
"""The size of a prompt that fits into a message to a stage, together with the parameters of its request."""

_PIECE_BYTES = 256
"""The bytes for which a piece counts at least in a session, because a small one takes more memory than its content."""


class Credit:
    """Counts the bytes that a client has appended, and limits those that no stage has consumed to a window.

    All limits are totals since the session was opened, as in InputGrant.
    """

    __slots__ = ("_consumed", "_pieces", "_window_bytes", "limit_bytes", "received_bytes")

    def __init__(self, window_bytes: int) -> None:
        self.received_bytes = 0
        """The total size of the accepted pieces, in bytes."""
        self.limit_bytes = window_bytes
        """The total number of bytes that the client may append, as it was reported to the client."""
        self._consumed = 0
        self._window_bytes = window_bytes
        # A deque would need a kilobyte of memory in each idle session.
        self._pieces: list[tuple[int, int]] = []
        """For each piece that is not consumed: the bytes of its packets that are not consumed, and its size."""

    def check(self, size_bytes: int) -> None:
        """Raises OverloadedError (INPUT_OVER_CREDIT) if a piece of this size exceeds the limit."""
        if self.received_bytes + size_bytes > self.limit_bytes:
            raise OverloadedError(
                f"a piece of {size_bytes:,} bytes exceeds the credit: {self.received_bytes:,} of {self.limit_bytes:,} "
                "bytes have been appended; wait for `grant`",
                reason="INPUT_OVER_CREDIT",
            )

    def add(self, size_bytes: int, *, packet_bytes: int = 0) -> None:
        """Counts an accepted piece.

        `packet_bytes` is the size of its packets, which stages consume later. If it is 0, the piece is consumed now.
        """
        self.received_bytes += size_bytes
        if packet_bytes:
            self._pieces.append((packet_bytes, size_bytes))
        else:
            self._consumed += size_bytes

    def consume(self, packet_bytes: int) -> None:
        """Records that the stages have consumed this number of bytes of packets, oldest first."""
        done = 0
        for left, size_bytes in self._pieces:
            if packet_bytes < left:
                self._pieces[done] = (left - packet_bytes, size_bytes)
                break
            packet_bytes -= left
            self._consumed += size_bytes
            done += 1
        del self._pieces[:done]

    def raise_limit(self) -> bool:
        """Raises the limit if the client has used at least half of the window. Returns whether it is higher now."""
        if self.limit_bytes - self.received_bytes > self._window_bytes // 2:
            return False
        former, self.limit_bytes = self.limit_bytes, self._consumed + self._window_bytes
        return self.limit_bytes > former


class TurnInput:
    """The input of a session's open turn.

    `max_bytes` limits the size of the transcript together with the input. `consumed` is called when stages have
    consumed a part of the streamed input.
    """

    def __init__(self, settings: SessionSettings, *, max_bytes: int, consumed: Callable[[], None]) -> None:
        self.credit = Credit(STREAM_WINDOW_BYTES if settings.streams else PROMPT_WINDOW_BYTES)
        self.prompt = PromptInput()
        """The pieces of the open turn in the mode PROMPT."""
        self.stream: StreamedInput | None = None
        """The packets of the open turn in the mode STREAM. None before the first piece."""
        self.audio_s = 0.0
        """The duration of the audio that the client has appended in the session, in seconds."""
        self._settings, self._consumed = settings, consumed
        self._pieces = 0
        self._max_bytes = max_bytes if settings.streams else min(max_bytes, _LARGEST_PROMPT_BYTES)

    @property
    def is_empty(self) -> bool:
        """Whether the open turn has no input."""
        return self.stream is None and not self.prompt.pieces

    def check(self, piece: orchestrator_pb2.InputAppend, *, transcript_bytes: int) -> Sequence[Packet]:
        """Checks a piece. Returns its packets if it is streamed, or if turns are detected in it.

        `transcript_bytes` is the size of the transcript. Raises OverloadedError (INPUT_OVER_CREDIT, SESSION_TOO_LARGE),
        UnsupportedError, or the errors of `packets_of`.
        """
        if piece.WhichOneof("piece") is None:
            refuse_unknown(piece, of="the client")
            raise InvalidRequestError("a piece of input is empty; set its part or its message", reason="INVALID_PROMPT")
        size_bytes = size_of(piece)
        self.credit.check(size_bytes)
        self.check_size(size_bytes, transcript_bytes=transcript_bytes)
        if not self._settings.streams:
            is_heard = self._settings.detection is not None and piece.part.HasField("audio")
            return packets_of(piece.part, kinds=HEARD_KINDS) if is_heard else ()
        if piece.WhichOneof("piece") == "message":
            raise UnsupportedError("messages cannot be streamed; append parts, or use the input mode PROMPT")
        return packets_of(piece.part, kinds=self._settings.input_tensors)

    def check_size(self, size_bytes: int, *, transcript_bytes: int) -> None:
        """Raises OverloadedError (SESSION_TOO_LARGE) if the session would be too large with further bytes."""
        stream_bytes = self.stream.size_bytes if self.stream is not None else 0
        input_bytes = max(self.prompt.size_bytes + stream_bytes, self._pieces * _PIECE_BYTES)
        if transcript_bytes + input_bytes + size_bytes > self._max_bytes:
            raise OverloadedError(
                f"the transcript and the input of the turn would have more than {self._max_bytes:,} bytes (a piece "
                f"counts for at least {_PIECE_BYTES}); commit or clear the turn, or open another session",
                reason="SESSION_TOO_LARGE",
            )

    def new_stream(self) -> StreamedInput:
        """Returns streamed input whose consumption raises the credit."""
        return StreamedInput(self._note_consumed)

    def add(self, piece: orchestrator_pb2.InputAppend, packets: Sequence[Packet]) -> None:
        """Adds a piece that was checked."""
        self.audio_s += duration_s(piece)
        self._pieces += 1
        if self.stream is None:
            self.prompt.append(piece)
            self.credit.add(size_of(piece))
            return
        self.credit.add(size_of(piece), packet_bytes=sum(packet.size_bytes for packet in packets))
        for packet in packets:
            self.stream.append(packet)

    def drop(self) -> None:
        """Drops the input of the open turn. The request of the turn must not have begun."""
        if self.stream is not None:
            self.credit.consume(self.stream.size_bytes)
        self.begin_turn()

    def begin_turn(self, remaining: PromptInput | None = None) -> None:
        """Begins the input of the next turn, with the pieces that remain of the former one."""
        self.prompt, self.stream = remaining or PromptInput(self.audio_s), None
        self._pieces = len(self.prompt.pieces)

    def _note_consumed(self, packet_bytes: int) -> None:
        self.credit.consume(packet_bytes)
        self._consumed()
