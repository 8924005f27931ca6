"""Finds what operators name: replicas, stages, edges."""

from collections.abc import Sequence
from itertools import chain

from stagemesh.common.errors import NotFoundError
from stagemesh.orchestrator.fleet.edge_connectors import EdgeLink
from stagemesh.orchestrator.fleet.fleet import Fleet
from stagemesh.orchestrator.fleet.replica import Replica, ReplicaState
from stagemesh.orchestrator.spec import Edge, Pipeline

_RANKS = {ReplicaState.READY: 0, ReplicaState.FAILED: 2, ReplicaState.UNREACHABLE: 2}


class Directory:
    """The pipeline and its replicas as they are now, by name."""

    def __init__(self, pipeline: Pipeline, fleet: Fleet) -> None:
        self.pipeline = pipeline
        self._fleet = fleet

    @property
    def ready(self) -> bool:
        """Whether requests can be served."""
        return self._fleet.ready

    @property
    def replicas(self) -> list[Replica]:
        """All of them, by stage."""
        return list(chain.from_iterable(self.replicas_of(stage) for stage in self.pipeline.stages))

    def replicas_of(self, stage: str) -> Sequence[Replica]:
        """Those of a stage, by name: "a-2" before "a-10"."""
        return sorted(self._fleet.registry.of(stage), key=lambda replica: (len(replica.name), replica.name))

    def stage_replicas(self, stage: str) -> list[Replica]:
        """Those of a stage; raises NotFoundError (UNKNOWN_TARGET) where there is no such stage."""
        if stage not in self.pipeline.stages:
            raise NotFoundError(
                f"no stage {stage!r} here; stages: {', '.join(self.pipeline.stages)}",
                reason="UNKNOWN_TARGET",
                metadata={"target": stage},
            )
        return list(self.replicas_of(stage))

    def links_of(self, edge: Edge) -> Sequence[EdgeLink]:
        """An edge's links between replicas that are ready."""
        return self._fleet.edge_connectors.links_of(edge)

    def find(self, name: str) -> Replica | None:
        """The replica of this name. Of two, one of which is on its way out or refused, the other."""
        named = [replica for replica in self.replicas if replica.name == name]
        return min(named, key=lambda replica: _RANKS.get(replica.state, 1), default=None)

    def target(self, name: str) -> list[Replica]:
        """A replica, or those of a stage; raises NotFoundError (UNKNOWN_TARGET)."""
        replica = self.find(name)
        if replica is not None:
            return [replica]
        if name in self.pipeline.stages:
            return list(self.replicas_of(name))
        raise NotFoundError(
            f"no replica or stage {name!r} here; stages: {', '.join(self.pipeline.stages)}; replicas: "
            f"{', '.join(replica.name for replica in self.replicas) or 'none'}",
            reason="UNKNOWN_TARGET",
            metadata={"target": name},
        )

    def replica(self, name: str) -> Replica:
        """Raises NotFoundError (UNKNOWN_TARGET)."""
        replica = self.find(name)
        if replica is None:
            raise NotFoundError(
                f"no replica {name!r} here; replicas: {', '.join(each.name for each in self.replicas) or 'none'}",
                reason="UNKNOWN_TARGET",
                metadata={"target": name},
            )
        return replica

    def edge(self, name: str) -> Edge:
        """Raises NotFoundError (UNKNOWN_EDGE)."""
        for edge in self.pipeline.edges:
            if edge.name == name:
                return edge
        raise NotFoundError(
            f"no edge {name!r} here; edges: {', '.join(edge.name for edge in self.pipeline.edges) or 'none'}",
            reason="UNKNOWN_EDGE",
            metadata={"edge": name},
        )
