"""Calls into vLLM's engine core that end when the core dies."""

import asyncio
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, TypeVar, cast

from stagemesh.common.errors import InternalError, UnavailableError

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

T = TypeVar("T")

_DEATH_POLL_S = 0.2


class CoreRefusalError(InternalError):
    """vLLM's core or a worker raised an exception; the message is vLLM's."""

    default_reason = "VLLM_FAILED"


async def core_call(llm: "AsyncLLM", call: Coroutine[Any, Any, T]) -> T:
    """Returns the result of a call into the core.

    Raises CoreRefusalError if the core raises an exception, UnavailableError if the core dies.
    """
    task = asyncio.ensure_future(call)
    try:
        # A dead core never answers the calls that it received.
        while not (await asyncio.wait([task], timeout=_DEATH_POLL_S))[0] and not llm.errored:
            pass
    finally:
        task.cancel()
    if not task.done():
        raise UnavailableError("vLLM's engine core died during the call")
    try:
        return task.result()
    except Exception as exc:  # vLLM turns every failure of its core into a bare Exception
        if llm.errored:
            raise UnavailableError(f"vLLM's engine core has died: {exc}") from exc
        raise CoreRefusalError(f"vLLM rejects the call: {exc}") from exc


async def worker_call(llm: "AsyncLLM", method: str, *args: object) -> list[Any]:
    """Returns the results of a method of the workers' class, one for each worker. Raises the errors of `core_call`."""
    return await core_call(llm, cast("Coroutine[Any, Any, list[Any]]", llm.collective_rpc(method, args=args)))


async def runner_call(llm: "AsyncLLM", method: str, *args: object) -> list[Any]:
    """Returns the results of a method that a feature adds to the workers' model runners, one for each worker."""
    return await worker_call(llm, "call_runner", method, *args)
