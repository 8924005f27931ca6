"""Plans requests: chooses a replica for each stage.

The planner compares a few random replicas of a stage, and selects the replica with the least remaining work. If several
replicas have about the same amount of work, the planner prefers a co-located replica.

A comparison of all replicas would take longer the more replicas there are, and would send all requests that arrive
between two load reports to the same replica. A choice between two random replicas keeps all replicas about equally busy
(M. Mitzenmacher, "The Power of Two Choices in Randomized Load Balancing", 2001). A third candidate makes the slowest
requests of busy stages a seventh faster (`benchmarks/simulate.py`). In addition, the planner compares the same number
of random replicas on the host and in the zone of each upstream and downstream replica.
"""

import math
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from stagemesh.common.errors import NotFoundError, NotReadyError, StagemeshError, UnavailableError
from stagemesh.common.plugins.connectors import SHM
from stagemesh.common.process.stage_process import ReplicaState
from stagemesh.common.requests.adapter_selection import parse_adapters
from stagemesh.orchestrator.fleet.replica import Replica
from stagemesh.orchestrator.fleet.replica_registry import RandomPool, ReadyReplicas, ReplicaRegistry
from stagemesh.orchestrator.fleet.stage_adapters import StageAdapters
from stagemesh.pipeline import Pipeline, Route, Stage

_CANDIDATES = 3
# The additional work in seconds that a co-located replica may have and still be preferred. This is about the cost of
# sending to another host or zone, which is far less than the cost of a step.
_OTHER_HOST_S = 0.005
_OTHER_ZONE_S = 0.02
# The additional work in seconds that a preferred replica may have. This is about the time in which a language model
# computes the states of a conversation of a few thousand tokens, which the preferred replica may have in its cache.
_PREFERRED_S = 0.25
_RETRY_AFTER_S = 1.0
_NONE: Mapping[str, str] = MappingProxyType({})
_RECOVERING = frozenset({ReplicaState.LOADING, ReplicaState.UNREACHABLE})
_WARM = frozenset({ReplicaState.ASLEEP, ReplicaState.DRAINING})
"""The states of a replica that sleeps or is about to sleep."""
_MAX_NAMED = 8
"""The maximum number of replicas that an error message names."""


class NotReadyYetError(UnavailableError):
    """Raised if a stage has no ready replica, but at least one of its replicas may become ready soon."""


def _unready(message: str, *, soon: bool, metadata: Mapping[str, str] = _NONE) -> UnavailableError:
    """Returns the error of a stage without a suitable replica.

    The error is a NotReadyYetError if `soon` is True: a replica may become suitable soon.
    """
    kind = NotReadyYetError if soon else UnavailableError
    return kind(message, reason="STAGE_NOT_READY", metadata=metadata, retry_after_s=_RETRY_AFTER_S)


class LeastWork:
    """Selects the replica with the least remaining work among a few random replicas. Prefers co-located replicas."""

    def __init__(self, rng: random.Random | None = None) -> None:
        self._rng = rng or random.Random()  # noqa: S311

    def choose(
        self, ready: ReadyReplicas, *, near: Sequence[Replica] = (), avoid: Collection[Replica] = ()
    ) -> Replica | None:
        """Returns a ready replica that is not in `avoid`, or None if there is none.

        `near` contains the replicas that run the request's upstream and downstream stages.
        """
        candidates = self._draw(ready.all, avoid)
        for peer in near:
            candidates += self._draw(ready.on_host(peer.host), avoid)
            candidates += self._draw(ready.in_zone(peer.zone), avoid)
        return min(candidates, key=lambda replica: replica.load.backlog_s + _distance_s(replica, near), default=None)

    def _draw(self, pool: RandomPool[Replica], avoid: Collection[Replica]) -> list[Replica]:
        drawn = pool.draw(_CANDIDATES + len(avoid), self._rng)
        self._rng.shuffle(drawn)
        return [replica for replica in drawn if replica not in avoid][:_CANDIDATES]


@dataclass(frozen=True)
class PlannedStep:
    """One stage of one request, and the replica that runs it."""

    stage: Stage
    replica: Replica
    release: Callable[[], None]
    """A function that removes the step from the load of its replica. Idempotent."""


@dataclass(eq=False)
class Plan:
    """The replicas that run one request. Each step counts as load on its replica until the step is released."""

    steps: dict[str, PlannedStep]
    """The newest step of each stage, by stage name. Producers precede consumers."""
    route: Route
    generation: str = ""
    """The generation to which all replicas of the plan belong."""
    adapters: Mapping[str, str] = field(default_factory=dict[str, str])
    """The adapters that the request selects, by stage name, in the form that `parse_adapters` reads."""

    @property
    def replicas(self) -> Mapping[str, str]:
        """The name of each stage's replica, by stage name."""
        return {stage: step.replica.name for stage, step in self.steps.items()}

    def move(self, stage: str, replica: Replica) -> PlannedStep:
        """Replaces the step of a stage with a new step on `replica`. Returns the new step.

        The previous step must already be released.
        """
        step = self.steps[stage] = _step(self.steps[stage].stage, replica)
        return step

    def release(self) -> None:
        """Removes every step from the load of its replica. Skips steps that are already released."""
        for step in self.steps.values():
            step.release()


class Planner:
    """Chooses the replicas that run each request. Considers only ready replicas.

    The time to plan a request does not depend on the number of replicas.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        registry: ReplicaRegistry,
        *,
        adapters: StageAdapters | None = None,
        warm: Collection[str] = (),
        choice: LeastWork | None = None,
    ) -> None:
        """Creates a planner. `adapters` are the adapters that replicas load when they become ready.

        `warm` are the stages whose sleeping replicas are woken when requests need them.
        """
        self._warm = warm
        self._adapters = adapters or StageAdapters()
        self._pipeline = pipeline
        self._registry = registry
        self._rng = random.Random()  # noqa: S311
        self._choice = choice or LeastWork(self._rng)

    def plan(
        self,
        route: Route,
        *,
        adapters: Mapping[str, str] = _NONE,
        generation: str = "",
        preferred: Mapping[str, str] = _NONE,
        insists: bool = False,
    ) -> Plan:
        """Chooses a ready replica for each stage of a route. All chosen replicas belong to one generation.

        `adapters` maps stages of the route to the adapter that the chosen replica must have loaded. Raises
        NotFoundError (UNKNOWN_ADAPTER) if no ready replica of a stage has its adapter, or a NotReadyYetError if one of
        them is about to load it.

        `generation` is the generation of all chosen replicas, or empty for any. Raises NotReadyError (GENERATION_ENDED)
        if an upgrade has replaced it.

        `preferred` contains names of replicas by stage. A stage uses its preferred replica if that is ready and has
        little more work than the replica that would be chosen otherwise, or any work if `insists` is True.

        Raises UnavailableError (STAGE_NOT_READY) if no generation has a ready replica of each stage. The error message
        contains the states of the replicas of a stage that has no ready replica. If one of these replicas may become
        ready soon, the error is a NotReadyYetError.
        """
        generation, ready = self._choose_generation([stage.name for stage in route.stages], adapters, only=generation)
        chosen: dict[str, Replica] = {}
        for stage in route.stages:
            able = ready[stage.name].with_adapters(adapters.get(stage.name))
            able = able.only_on_host(self._required_host(stage.name, chosen))
            replica = self._choice.choose(able, near=self._adjacent(stage.name, chosen))
            if replica is None:
                raise self._not_ready(stage.name)
            more_s = math.inf if insists else _PREFERRED_S
            chosen[stage.name] = _preferred(able, preferred.get(stage.name), otherwise=replica, more_s=more_s)
        steps = {stage.name: _step(stage, chosen[stage.name]) for stage in route.stages}
        return Plan(steps, route, generation, adapters)

    def choose_again(self, stage: str, plan: Plan, *, avoid: Collection[Replica]) -> Replica:
        """Returns a ready replica for the restart of a stage.

        The replica has loaded the plan's adapter, belongs to the plan's generation, and is not in `avoid`.
        Raises UnavailableError (STAGE_NOT_READY) if there is no such replica.
        """
        ready = self._registry.ready([stage]).get(plan.generation, {}).get(stage)
        chosen = {name: step.replica for name, step in plan.steps.items() if name != stage}
        able = ready and ready.with_adapters(plan.adapters.get(stage))
        able = able and able.only_on_host(self._required_host(stage, chosen))
        replica = able and self._choice.choose(able, near=self._adjacent(stage, chosen), avoid=avoid)
        if not replica:
            raise self._not_ready(stage)
        return replica

    def has_ended(self, stage: str, plan: Plan) -> bool:
        """Returns whether an upgrade has replaced the plan's generation, so that `choose_again` cannot succeed.

        This is the case if no replica of the stage may become ready again in this generation, and another generation
        has a ready replica of each stage of the plan.
        """
        return not self._may_return(stage, plan.generation) and bool(self._registry.ready(plan.steps.keys()))

    def _may_return(self, stage: str, generation: str) -> bool:
        return any(each.generation == generation and each.may_return for each in self._registry.of(stage))

    def _choose_generation(
        self, stages: Sequence[str], adapters: Mapping[str, str], *, only: str
    ) -> tuple[str, Mapping[str, ReadyReplicas]]:
        """Chooses a random generation in which every stage has a ready replica with its adapter.

        If `only` is not empty, only this generation can be chosen. Returns the generation and its ready replicas by
        stage name. The weight of a generation in the random choice is the smallest number of ready replicas that any of
        the stages has.
        """
        ready = self._registry.ready(stages)
        if not ready:
            missing = next((stage for stage in stages if not self._registry.has_ready(stage)), None)
            raise self._not_ready(missing) if missing else self._no_common_generation(stages)
        if only:
            ready = {only: ready[only]} if only in ready else {}
        if not ready:
            raise self._without_generation(only, stages)
        for stage, adapter in adapters.items():
            able = {name: each for name, each in ready.items() if each[stage].with_adapters(adapter).all}
            if not able:
                raise self._no_adapter(stage, adapter)
            ready = able
        if len(ready) == 1:
            return next(iter(ready.items()))
        weights = [min(len(by_stage[stage].all) for stage in stages) for by_stage in ready.values()]
        return self._rng.choices(list(ready.items()), weights)[0]

    def _no_adapter(self, stage: str, adapter: str) -> StagemeshError:
        expected = all(self._adapters.path_of(stage, each.name) is not None for each in parse_adapters(adapter))
        ready = [replica for replica in self._registry.of(stage) if replica.state is ReplicaState.READY]
        if expected or any(replica.adapters is None for replica in ready):
            return NotReadyYetError(
                f"no ready replica of stage {stage!r} has loaded adapter {adapter!r} yet; try again later",
                reason="STAGE_NOT_READY",
                metadata={"stage": stage, "adapter": adapter},
                retry_after_s=_RETRY_AFTER_S,
            )
        known = sorted({name for replica in ready for name in replica.adapters or ()})
        return NotFoundError(
            f"no ready replica of stage {stage!r} has adapter {adapter!r}; loaded: {', '.join(known) or 'none'}",
            reason="UNKNOWN_ADAPTER",
            metadata={"stage": stage, "adapter": adapter},
        )

    def _adjacent(self, stage: str, chosen: Mapping[str, Replica]) -> list[Replica]:
        """Returns the replicas in `chosen` that run the upstream and downstream stages of `stage`.

        `chosen` maps stage names to the replicas that have been chosen so far.
        """
        edges = (*self._pipeline.incoming(stage), *self._pipeline.outgoing(stage))
        names = dict.fromkeys(edge.producer if edge.consumer == stage else edge.consumer for edge in edges)
        return [chosen[name] for name in names if name in chosen]

    def _required_host(self, stage: str, chosen: Mapping[str, Replica]) -> str:
        """Returns the host on which the stage must run, because a fixed shm edge connects it to a replica in `chosen`.

        Returns an empty string if the stage may run on any host. A replica that is ending requires nothing, because it
        is replaced, too.
        """
        for edge in (*self._pipeline.incoming(stage), *self._pipeline.outgoing(stage)):
            other = chosen.get(edge.producer if edge.consumer == stage else edge.consumer)
            if edge.connector == SHM and other is not None and not other.is_ending:
                return other.host
        return ""

    def _not_ready(self, stage: str) -> UnavailableError:
        replicas = self._registry.of(stage)
        states = ", ".join(_describe(replica) for replica in replicas[:_MAX_NAMED]) or "it has no replicas"
        more = f" and {len(replicas) - _MAX_NAMED} more" if len(replicas) > _MAX_NAMED else ""
        return _unready(
            f"no replica of stage {stage!r} is ready: {states}{more}; try again when `stagemesh stages` shows it ready",
            soon=any(map(self._may_become_ready, replicas)),
            metadata={"stage": stage},
        )

    def _without_generation(self, generation: str, stages: Sequence[str]) -> StagemeshError:
        if all(self._may_return(stage, generation) for stage in stages):
            return _unready(
                f"a stage has no ready replica of generation {generation}, in which the request began; try again later",
                soon=True,
            )
        return NotReadyError(
            f"the request began in generation {generation}, which an upgrade has replaced; send the request again with "
            "another request_id",
            reason="GENERATION_ENDED",
        )

    def _no_common_generation(self, stages: Sequence[str]) -> UnavailableError:
        return _unready(
            "every stage has a ready replica, but no generation has one of every stage, because an upgrade is in "
            "progress; try again later",
            soon=any(self._may_become_ready(each) for stage in stages for each in self._registry.of(stage)),
        )

    def _may_become_ready(self, replica: Replica) -> bool:
        """Returns whether a replica is loading, is down but may recover without an operator's intervention, or sleeps
        and is woken when requests need it.
        """
        states = _RECOVERING | _WARM if replica.stage in self._warm else _RECOVERING
        return replica.end_cause is not None or replica.state in states


def _preferred(able: ReadyReplicas, name: str | None, *, otherwise: Replica, more_s: float) -> Replica:
    if name is None or name == otherwise.name:
        return otherwise
    limit_s = otherwise.load.backlog_s + more_s
    return next((each for each in able.all if each.name == name and each.load.backlog_s <= limit_s), otherwise)


def _step(stage: Stage, replica: Replica) -> PlannedStep:
    return PlannedStep(stage, replica, release=replica.load.place())


def _describe(replica: Replica) -> str:
    detail = f" ({replica.detail})" if replica.detail else ""
    return f"{replica.name} {replica.state.name.lower()}{detail}"


def _distance_s(replica: Replica, near: Sequence[Replica]) -> float:
    return sum(_crossing_s(replica, peer) for peer in near)


def _crossing_s(one: Replica, other: Replica) -> float:
    if one.host and one.host == other.host:
        return 0.0
    return _OTHER_HOST_S if one.zone and one.zone == other.zone else _OTHER_ZONE_S
