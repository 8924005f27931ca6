"""Calls to vLLM's engine core, which raise an error if the core terminates, and the shutdown of the core."""

import asyncio
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, TypeVar, cast

from stagemesh.common.errors import InternalError, UnavailableError

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

T = TypeVar("T")

_DEATH_POLL_S = 0.2


class CoreRefusalError(InternalError):
    """Raised if vLLM's engine core or a worker raises an exception during a call.

    The error's message includes vLLM's message.
    """

    default_reason = "ENGINE_ERROR"


def shut_down(llm: "AsyncLLM") -> None:
    """Ends vLLM's processes and releases its sockets and tasks. Call it on the thread that started the processes.

    vLLM kills an engine core that does not end in time. If the core ends at that moment by itself, vLLM raises
    NoSuchProcess instead of releasing anything. This function then releases the rest.
    """
    from psutil import NoSuchProcess

    try:
        llm.shutdown()
    except NoSuchProcess:
        cast("Any", llm.engine_core).resources()
        llm.shutdown()


async def core_call(llm: "AsyncLLM", call: Coroutine[Any, Any, T]) -> T:
    """Awaits a call to vLLM's engine core and returns the call's result.

    Raises CoreRefusalError if the core raises an exception. Raises UnavailableError if the core terminates during the
    call.
    """
    task = asyncio.ensure_future(call)
    try:
        # A terminated core never answers the calls that it received.
        while not (await asyncio.wait([task], timeout=_DEATH_POLL_S))[0] and not llm.errored:
            pass
    finally:
        task.cancel()
    if not task.done():
        raise UnavailableError("vLLM's engine core died during the call", reason="ENGINE_FAILED")
    try:
        return task.result()
    except Exception as exc:  # vLLM converts every failure of its core to a bare Exception
        if llm.errored:
            raise UnavailableError(f"vLLM's engine core has died: {exc}", reason="ENGINE_FAILED") from exc
        raise CoreRefusalError(f"vLLM rejects the call: {exc}") from exc


async def worker_call(llm: "AsyncLLM", method: str, *args: object) -> list[Any]:
    """Calls a method of all vLLM workers. Returns a list of the results, one for each worker.

    Raises the same errors as `core_call`.
    """
    return await core_call(llm, cast("Coroutine[Any, Any, list[Any]]", llm.collective_rpc(method, args=args)))


async def runner_call(llm: "AsyncLLM", method: str, *args: object) -> list[Any]:
    """Calls a method of all vLLM workers' model runners. Returns a list of the results, one for each worker.

    The method belongs to a feature's mixin for model runners. Raises the same errors as `core_call`.
    """
    return await worker_call(llm, "call_runner", method, *args)
