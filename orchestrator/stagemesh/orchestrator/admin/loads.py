"""What replicas have to do, asked when somebody wants to see it."""

import asyncio
from collections.abc import Mapping, Sequence

from stagemesh.common.errors import StagemeshError
from stagemesh.orchestrator.fleet.replica import Replica, ReplicaState
from stagemesh.v1 import stage_pb2

Load = stage_pb2.WatchLoadResponse

_TIMEOUT_S = 1.0
_ANSWERING = frozenset({ReplicaState.READY, ReplicaState.DRAINING, ReplicaState.ASLEEP, ReplicaState.LOADING})


async def ask_loads(replicas: Sequence[Replica]) -> Mapping[str, Load]:
    """The load of each replica that answers, by name; takes about a second at most."""
    asked = [replica for replica in replicas if replica.state in _ANSWERING]
    answers = await asyncio.gather(*(_ask(replica) for replica in asked))
    return {replica.name: load for replica, load in zip(asked, answers, strict=True) if load is not None}


async def _ask(replica: Replica) -> Load | None:
    try:
        return await replica.client.load(timeout_s=_TIMEOUT_S)
    except StagemeshError:
        return None
