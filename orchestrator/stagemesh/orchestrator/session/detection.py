"""The detection of turns: finds speech in the audio that a client appends, and says when a turn ends."""

import logging
from collections.abc import Callable, Sequence

from stagemesh.common.errors import InternalError, StagemeshError
from stagemesh.connectors.edge import Packet
from stagemesh.orchestrator.request.streamed_input import StreamedInput
from stagemesh.orchestrator.session.answer import RunningRequest
from stagemesh.orchestrator.session.listener import Listener, Speech
from stagemesh.orchestrator.session.tasks import Spawn, Task

_log = logging.getLogger(__name__)

_MAX_LISTENED_BYTES = 8 << 20
"""The size of the audio without speech after which another listener continues, in bytes."""


class TurnDetector:
    """Listens to the audio of one turn after another.

    - `listen` starts the request of a listener.
    - `heard` is called for each begin and each end of speech.
    - `failed` is called if a listener ends although its audio has not ended, with its error or with None.
    """

    def __init__(
        self,
        *,
        listen: Callable[[StreamedInput], RunningRequest],
        heard: Callable[[Speech], None],
        failed: Callable[[StagemeshError | None], None],
        spawn: Spawn,
    ) -> None:
        self.speaks = False
        """Whether the audio so far ends within speech."""
        self._listen, self._heard, self._failed, self._spawn = listen, heard, failed, spawn
        self._listener: Listener | None = None
        self._task: Task | None = None

    @property
    def listens(self) -> bool:
        """Whether a listener runs."""
        return self._listener is not None

    def hear(self, packets: Sequence[Packet], *, at_s: float) -> None:
        """Passes further audio to the listener, and starts a listener if none runs.

        `at_s` is the time in the audio of the session at which the packets begin. Raises the error of a listener that
        cannot be started.
        """
        if self._listener is not None and not self.speaks and self._listener.size_bytes > _MAX_LISTENED_BYTES:
            self.stop()
        if self._listener is None:
            stream = StreamedInput(_ignore)
            self._listener = Listener(self._listen(stream), stream, begins_s=at_s)
            self._task = self._spawn(self._follow(self._listener))
        self._listener.hear(packets)

    def stop(self) -> None:
        """Stops the listener. The next audio starts another one. Idempotent."""
        if self._listener is not None and self._task is not None:
            self._listener.stop()
            self._task.cancel()
        self._listener = self._task = None

    def forget_speech(self) -> None:
        """Stops the listener, and begins the next turn without speech."""
        self.stop()
        self.speaks = False

    async def _follow(self, listener: Listener) -> None:
        error: StagemeshError | None = None
        try:
            async for speech in listener.events():
                # A listener that hears the audio of a turn again finds its speech again.
                if speech.begins != self.speaks:
                    self.speaks = speech.begins
                    self._heard(speech)
        except StagemeshError as exc:
            error = exc
        except Exception:  # noqa: BLE001
            _log.exception("a listener failed unexpectedly")
            error = InternalError("the orchestrator failed; its log has the details")
        if self._listener is listener:
            self._listener = self._task = None
            self._failed(error)


def _ignore(size_bytes: int) -> None:
    """Does nothing when a byte is consumed: the turn's own input determines the credit."""
