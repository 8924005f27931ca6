"""A call that can be suspended at certain points, where other calls can run before it continues."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeAlias, TypeVar

import torch

Point = TypeVar("Point")
Result = TypeVar("Result")
Suspend: TypeAlias = Callable[[Point], None]
"""Suspends the call in which it is called. The argument is the value that `SuspendedCall.advance` returns."""


class SuspendedCall(Generic[Point, Result]):
    """Runs a call without gradients in its own thread. The call runs only during `advance`, up to its next point.

    The thread starts with the first `advance` and ends with the call or with `close`. Not thread-safe.
    """

    def __init__(self, run: Callable[[Suspend[Point]], Result]) -> None:
        """`run` is the call. It receives the function that suspends it, and calls this function at each point."""
        self._run = run
        self.point: Point | None = None
        """The value of the latest point, or None before the first one."""
        self._resumed, self._stopped = threading.Semaphore(0), threading.Semaphore(0)
        self._closing = False
        self._outcome: Future[Result] = Future()
        # A daemon thread, because a call that was never closed must not keep the process alive.
        self._thread = threading.Thread(target=self._execute, name="suspended call", daemon=True)

    @property
    def ended(self) -> bool:
        """Whether the call has returned, has raised an error or was closed."""
        return self._outcome.done()

    @property
    def result(self) -> Result:
        """The value that the call has returned. Raises the call's error, or CancelledError if it was closed.

        Must not be read before the call has ended.
        """
        return self._outcome.result(timeout=0)

    def advance(self) -> Point | None:
        """Runs the call up to its next point and returns the value of this point, or None if the call has returned.

        Raises the error that the call raises. The call has ended then. Must not be called after the end.
        """
        assert not self.ended, "the call has ended"
        self._continue()
        if self.ended:
            self._outcome.result()
            return None
        return self.point

    def close(self) -> None:
        """Ends the call by an exception at its current point, and waits until its thread has ended.

        Does nothing if the call has ended. May be called more than once.
        """
        self._closing = True
        if self._thread.is_alive():
            self._continue()
        self._outcome.cancel()

    # -- inner workings

    def _continue(self) -> None:
        if self._thread.ident is None:
            self._thread.start()
        else:
            self._resumed.release()
        self._stopped.acquire()
        if self.ended:
            self._thread.join()

    def _execute(self) -> None:
        try:
            with torch.no_grad():
                self._outcome.set_result(self._run(self._suspend))
        except _ClosedError:
            self._outcome.cancel()
        except BaseException as exc:  # noqa: BLE001  # raised again by `advance`
            self._outcome.set_exception(exc)
        self._stopped.release()

    def _suspend(self, point: Point) -> None:
        # A call may catch the exception below and reach another point, where it is raised again.
        if not self._closing:
            self.point = point
            self._stopped.release()
            self._resumed.acquire()
        if self._closing:
            raise _ClosedError


class _ClosedError(BaseException):
    """Ends a closed call. Derives from BaseException because a call may handle every Exception."""
