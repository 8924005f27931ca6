"""Calls of a store's library: each in a thread of its own, with a time limit, and with Stagemesh's errors."""

import asyncio
import errno
import logging
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from functools import partial
from typing import TypeVar

from stagemesh.common.errors import NotFoundError, NotReadyError, OverloadedError, StagemeshError

_log = logging.getLogger(__name__)

_CALL_S = 60.0
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_DENIED = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
_MISSING = (FileNotFoundError, NotADirectoryError, IsADirectoryError)

_Result = TypeVar("_Result")


async def call_store(
    function: Callable[[], _Result],
    *,
    what: str,
    is_read: bool = False,
    release: Callable[[_Result], None] | None = None,
    timeout_s: float | None = _CALL_S,
) -> _Result:
    """Calls a blocking function in a new daemon thread and returns its result.

    - `what` names the file or the store in the errors.
    - `is_read` is True if the function reads a file whose absence is the request's fault.
    - `release` is called with the result if the caller was cancelled, or the time was up, before the result arrived.
    - `timeout_s` is the time limit of the call in seconds, or None for no limit.

    A thread whose caller was cancelled delays neither other requests nor the end of the process. Raises
    OverloadedError (STORAGE_FULL), NotFoundError (UNKNOWN_MEDIA), NotReadyError (STORE_DENIED, STORE_UNREACHABLE), or
    the StagemeshError that the function raises.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[_Result] = loop.create_future()

    def deliver(result: _Result) -> None:
        if not future.done():
            future.set_result(result)
        elif release is not None:
            _start(partial(release, result), what)

    def fail(exc: Exception) -> None:
        if not future.done():
            future.set_exception(exc)

    def run() -> None:
        try:
            with _translated_errors(what, is_read=is_read):
                result = function()
        except Exception as exc:  # noqa: BLE001 - the caller receives it
            # The loop may have ended meanwhile.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(fail, exc)
            return
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(deliver, result)

    _start(run, what)
    try:
        async with asyncio.timeout(timeout_s):
            return await future
    except TimeoutError as exc:
        raise _unreachable(what, f"no answer for {timeout_s:g} s") from exc


def _start(function: Callable[[], None], what: str) -> None:
    threading.Thread(target=function, name=f"media {what[-40:]}", daemon=True).start()


@contextmanager
def _translated_errors(what: str, *, is_read: bool) -> Generator[None]:
    try:
        yield
    except StagemeshError:
        raise
    except OSError as exc:
        # fsspec raises FileNotFoundError for a web server that it cannot reach.
        if is_read and isinstance(exc, _MISSING) and not isinstance(exc.__cause__, OSError):
            raise NotFoundError(
                f"{what} does not exist; it may have been deleted; upload the file again, or refer to another one",
                reason="UNKNOWN_MEDIA",
            ) from exc
        if exc.errno in _FULL:
            raise OverloadedError(
                f"no space is left for {what}: {exc.strerror}; the operator must free space", reason="STORAGE_FULL"
            ) from exc
        if exc.errno in _DENIED or isinstance(exc, PermissionError):
            raise NotReadyError(
                f"the store denies access to {what}: {exc.strerror or exc}; the operator must correct its permissions, "
                "or the credentials of this service",
                reason="STORE_DENIED",
            ) from exc
        raise _unreachable(what, str(exc)) from exc
    except Exception as exc:
        # fsspec's file systems raise the errors of their own libraries.
        _log.warning("a call of the store failed for %s", what, exc_info=True)
        raise _unreachable(what, f"{type(exc).__name__}: {exc}") from exc


def _unreachable(what: str, cause: str) -> NotReadyError:
    return NotReadyError(
        f"the store of {what} cannot be reached: {cause[:200]}; try again later", reason="STORE_UNREACHABLE"
    )
