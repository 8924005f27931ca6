"""Workers in several processes, which compute together."""

import asyncio
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from stagemesh.common.errors import UnavailableError
from stagemesh.services.engines.cleanup import run_to_completion
from stagemesh.services.engines.diffusion.options import DiffusionOptions
from stagemesh.services.engines.diffusion.parallel.rank_messages import RankCall, Reply, Setup
from stagemesh.services.engines.diffusion.parallel.rank_process import RankProcess, start_rank

_AGREE_S = 10.0
"""Once a rank has failed, the others have as long to say the same: they may wait for it, and would for minutes."""


class ProcessExecutor:
    """See `Executor`. All ranks do all calls in the same order, so that they meet where they compute together.

    They are one: when one ends, or fails where the others do not, all are ended. Rank 0's answers count.
    """

    def __init__(self, folder: Path, options: DiffusionOptions) -> None:
        self._folder, self._options = folder, options
        self._ranks: list[RankProcess] = []
        self._watchers: list[asyncio.Task[None]] = []
        self._calling = asyncio.Lock()
        self._failure = ""
        self._failed = asyncio.Event()
        self._meeting: Path | None = None

    async def start(self, report: Callable[[str], None]) -> None:
        """See `Executor`."""
        count = self._options.parallel.ranks
        report(f"importing diffusers in {count} processes")
        self._meeting = await asyncio.to_thread(lambda: Path(tempfile.mkdtemp(prefix="stagemesh-ranks-")))
        setups = [Setup(self._folder, self._options, rank, self._meeting / "store") for rank in range(count)]
        for setup in setups:
            self._ranks.append(await start_rank(f"rank {setup.rank} of {count}"))
        self._watchers = [asyncio.create_task(self._watch(rank), name="diffusion rank") for rank in self._ranks]
        async with self._calling:
            await run_to_completion(self._all(setups))

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """See `Executor`."""
        async with self._calling:
            return await run_to_completion(self._all([RankCall(method, args, kwargs)] * len(self._ranks)))

    async def wait_failed(self) -> str:
        """See `Executor`."""
        await self._failed.wait()
        return self._failure

    async def close(self) -> None:
        """See `Executor`."""
        watchers, self._watchers = self._watchers, []
        for watcher in watchers:
            watcher.cancel()
        if watchers:
            await asyncio.wait(watchers)
        ranks, self._ranks = self._ranks, []
        self._fail("the workers' processes are closed", kill=False)
        await asyncio.gather(*(rank.close() for rank in ranks))
        meeting, self._meeting = self._meeting, None
        if meeting is not None:
            await asyncio.to_thread(shutil.rmtree, meeting, ignore_errors=True)

    @property
    def pids(self) -> list[int]:
        """Of the processes, by rank."""
        return [rank.pid for rank in self._ranks]

    # -- inner workings

    async def _all(self, messages: list[Any]) -> Any:
        if self._failed.is_set():
            raise UnavailableError(self._failure)
        asking = [asyncio.ensure_future(rank.ask(message)) for rank, message in zip(self._ranks, messages, strict=True)]
        try:
            first = await self._agreed(asking)
        except UnavailableError as exc:
            self._fail(exc.message)
            raise UnavailableError(self._failure) from exc
        finally:
            # Those that are left have been killed.
            await asyncio.wait(asking)
            for each in asking:
                each.exception()
        if first.error is not None:
            raise first.error
        return first.value

    async def _agreed(self, asking: Sequence["asyncio.Future[Reply]"]) -> Reply:
        """Rank 0's answer, once all have answered; raises UnavailableError where one is gone or they disagree."""
        waiting, limit_s = set(asking), None
        while waiting:
            done, waiting = await asyncio.wait(waiting, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                raise UnavailableError(f"the ranks have parted: one has failed ({_said(asking)}), others go on")
            if any(_failure_in(each.result()) for each in done):
                limit_s = _AGREE_S
        replies = [each.result() for each in asking]
        if len({reply.failures for reply in replies}) > 1:
            raise UnavailableError(f"the ranks have parted: they end a call differently ({_said(asking)})")
        return replies[0]

    async def _watch(self, rank: RankProcess) -> None:
        self._fail(await rank.ended())

    def _fail(self, cause: str, *, kill: bool = True) -> None:
        """All are one: the first cause is that of all."""
        if not self._failed.is_set():
            self._failure = cause
            self._failed.set()
        if kill:
            for rank in self._ranks:
                rank.kill()


def _failure_in(reply: Reply) -> bool:
    return any(reason is not None for reason in reply.failures)


def _said(asking: Sequence["asyncio.Future[Reply]"]) -> str:
    said: list[str] = []
    for rank, each in enumerate(asking):
        if each.done():
            error = each.result().error
            said.append(f"rank {rank}: {error.message if error is not None else each.result().failures or 'done'}")
    return "; ".join(said)
