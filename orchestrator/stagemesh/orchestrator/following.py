"""Follows one step at its replica, over connections that break."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress

from stagemesh.connectors.errors import InternalError, StagemeshError, UnavailableError
from stagemesh.orchestrator.replica import Replica
from stagemesh.orchestrator.stages import REPLICA_LOST
from stagemesh.v1 import stage_pb2

ACCEPT_S = 5.0
"""How long a replica has to take a step."""
REATTACH_S = 2.0
"""How long a replica may be out of reach before its steps are taken elsewhere; less than it keeps them for us."""
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.05, 0.4


async def follow_step(
    replica: Replica, request: stage_pb2.ExecuteStepRequest, *, stage: str, deadline_s: float
) -> AsyncGenerator[stage_pb2.ExecuteStepResponse]:
    """A step's events, accepted first, each once; iterate within `aclosing`. `deadline_s` is in the loop's time.

    The step is called again where the connection broke. Raises what it failed with; UnavailableError (NOT_ACCEPTED)
    where it was not taken in time, (REPLICA_LOST) where its replica stays out of reach.
    """
    loop = asyncio.get_running_loop()
    heard, broken_s, pause_s = 0, 0.0, _FIRST_PAUSE_S
    while True:
        seen = 0
        try:
            left_s = max(0.0, deadline_s - loop.time())
            async with aclosing(replica.client.execute(request, timeout_s=left_s)) as events:
                first = await _first(events, replica, stage=stage)
                broken_s, pause_s, seen = 0.0, _FIRST_PAUSE_S, 1
                if not heard:
                    heard = 1
                    yield first
                async for event in events:
                    seen += 1
                    if seen > heard:
                        heard = seen
                        yield event
        except StagemeshError as exc:
            if exc.reason != REPLICA_LOST:
                raise
            broken_s = broken_s or loop.time()
            if replica.gone is not None or loop.time() - broken_s >= REATTACH_S:
                raise
            await asyncio.sleep(pause_s)
            pause_s = min(_LAST_PAUSE_S, 2 * pause_s)
            await _check_same(replica, stage=stage, timeout_s=max(0.0, broken_s + REATTACH_S - loop.time()))
        else:
            return


async def _first(
    events: AsyncGenerator[stage_pb2.ExecuteStepResponse], replica: Replica, *, stage: str
) -> stage_pb2.ExecuteStepResponse:
    try:
        async with asyncio.timeout(ACCEPT_S):
            first = await anext(events, None)
    except TimeoutError as exc:
        raise UnavailableError(
            f"stage {stage!r} (replica {replica.name} at {replica.endpoint}) did not take the request within "
            f"{ACCEPT_S:.0f} s; try again, and see its log",
            reason="NOT_ACCEPTED",
        ) from exc
    if first is None or first.WhichOneof("event") != "accepted":
        raise InternalError(f"stage {stage!r} did not say that it accepted the request; see its log")
    return first


async def _check_same(replica: Replica, *, stage: str, timeout_s: float) -> None:
    """Raises where another process serves at the address by now: it knows nothing of the step, and would begin it."""
    with suppress(StagemeshError):
        said = await replica.client.describe(timeout_s=timeout_s)
        if said.incarnation != replica.incarnation:
            restarted = UnavailableError(
                f"replica {replica.name} of stage {stage!r} at {replica.endpoint} was started anew under the request",
                reason="REPLICA_RESTARTED",
                metadata={"stage": stage, "replica": replica.name},
            )
            replica.end(restarted)
    if replica.gone is not None:
        raise replica.gone
