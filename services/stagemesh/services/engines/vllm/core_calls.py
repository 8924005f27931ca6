"""Calls into vLLM's engine core that are neither left halfway nor waited for in vain."""

import asyncio
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, TypeVar, cast

from stagemesh.common.errors import InternalError, UnavailableError

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

T = TypeVar("T")

_DEATH_POLL_S = 0.2


class CoreRefusalError(InternalError):
    """vLLM's core or a worker raised; the message is vLLM's."""

    default_reason = "VLLM_FAILED"


async def core_call(llm: "AsyncLLM", doing: Coroutine[Any, Any, T]) -> T:
    """What a call into the core returns; raises CoreRefusalError, and UnavailableError when the core dies."""
    task = asyncio.ensure_future(doing)
    try:
        # Nobody answers a call that a dead core had taken.
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
        raise CoreRefusalError(f"vLLM refuses: {exc}") from exc


async def worker_call(llm: "AsyncLLM", method: str, *args: object) -> list[Any]:
    """What a method of the workers' class returns, from each; raises as `core_call` does."""
    return await core_call(llm, cast("Coroutine[Any, Any, list[Any]]", llm.collective_rpc(method, args=args)))
