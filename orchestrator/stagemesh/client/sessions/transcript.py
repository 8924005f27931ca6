"""The transcript of a session at its client, from which another orchestrator can continue it."""

from collections.abc import Iterator, Mapping, Sequence

from stagemesh.client.requests import check_size
from stagemesh.common.answer_text import shorten
from stagemesh.common.prompt_input import PromptInput
from stagemesh.v1 import request_pb2
from stagemesh.v1.orchestrator_pb2 import ConverseRequest, InputAppend, TurnRestore


class ClientTranscript:
    """The turns that have ended: the messages of the input of each, then the answer.

    `has_prompts` is whether the pieces become messages. Streamed input does not.
    """

    def __init__(self, *, has_prompts: bool) -> None:
        self._has_prompts = has_prompts
        self._turns: list[TurnRestore] = []

    @property
    def answer(self) -> str:
        """The answer to the newest turn. Empty if no turn has ended."""
        return self._turns[-1].messages[-1].content if self._turns else ""

    @answer.setter
    def answer(self, text: str) -> None:
        self._turns[-1].messages[-1].content = text

    def add(self, turn: int, pieces: Sequence[InputAppend], *, answer: str) -> None:
        """Adds the newest turn."""
        restore = TurnRestore(turn=turn)
        if self._has_prompts:
            prompt = PromptInput()
            for piece in pieces:
                prompt.append(piece)
            restore.messages.extend(prompt.messages())
        restore.messages.add(role=request_pb2.ROLE_ASSISTANT, content=answer)
        self._turns.append(restore)

    def shortened(self, positions: Mapping[str, int], *, output: str, sent: Mapping[str, int]) -> str:
        """Returns the newest answer up to the first position in `positions`, as an orchestrator shortens it.

        `output` is the output whose text is the answer. `sent` is how much of each output was sent.
        """
        if output in positions:
            return self.answer[: positions[output]]
        shares = (position / sent[name] for name, position in positions.items() if sent.get(name))
        return shorten(self.answer, length=round(len(self.answer) * min(1.0, next(shares, 1.0))))

    def events(self) -> Iterator[ConverseRequest]:
        """Yields the events that restore all turns. Raises InvalidRequestError if a turn is too large for a message."""
        for turn in self._turns:
            event = ConverseRequest(restore=turn)
            check_size(event, what="turn to restore")
            yield event
