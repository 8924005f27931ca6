"""Loads, unloads and lists the adapters of whole stages on behalf of AdminService."""

from collections.abc import Collection, Sequence
from functools import partial

from stagemesh.common.errors import ExistsError, NotFoundError, StagemeshError, UnavailableError
from stagemesh.orchestrator.admin.directory import Directory, answers_of
from stagemesh.orchestrator.fleet.replica import Replica
from stagemesh.orchestrator.fleet.stage_adapters import StageAdapters, list_adapters, load_adapter, unload_adapter
from stagemesh.rpc.error_mapping import error_to_wire
from stagemesh.v1 import admin_pb2, control_pb2


class Adapters:
    """Controls the adapters of the stages of one pipeline."""

    def __init__(self, directory: Directory, remembered: StageAdapters) -> None:
        self._directory, self._remembered = directory, remembered

    async def load(self, stage: str, name: str, path: str, *, timeout_s: float) -> list[admin_pb2.AdapterOutcome]:
        """Loads an adapter on all replicas of a stage, and remembers it for replicas that start later.

        Returns the outcome for each replica. A replica whose outcome is an error gets no requests with the adapter
        until it has loaded it. If no replica loads the adapter, raises the error of the first replica, and the adapter
        is not remembered. Raises ExistsError (ADAPTER_EXISTS) if the stage has another folder's adapter of this name.
        """
        replicas = self._replicas(stage)
        former = self._remembered.path_of(stage, name)
        if former not in (None, path):
            raise ExistsError(
                f"adapter {name!r} of stage {stage!r} is already loaded from {former}; unload it, or use another name",
                reason="ADAPTER_EXISTS",
                metadata={"stage": stage, "adapter": name},
            )
        # A replica that becomes ready during the calls loads the adapter as well.
        self._remembered.remember(stage, name, path)
        answers = await answers_of(replicas, partial(load_adapter, name=name, path=path, timeout_s=timeout_s))
        try:
            _check_any(answers.values())
        except StagemeshError:
            if former is None:
                self._remembered.forget(stage, name)
            raise
        return [_outcome(replica, answer) for replica, answer in answers.items()]

    async def unload(
        self, stage: str, name: str, when_busy: "control_pb2.BusyPolicy.ValueType", *, timeout_s: float
    ) -> list[admin_pb2.AdapterOutcome]:
        """Unloads an adapter from all replicas of a stage, and forgets it.

        Returns the outcome for each replica that had the adapter or failed. If no replica unloads the adapter, raises
        the error of the first replica, and the adapter stays remembered. Raises NotFoundError (UNKNOWN_ADAPTER) if no
        replica has it.
        """
        replicas = self._replicas(stage)
        former = self._remembered.path_of(stage, name)
        self._remembered.forget(stage, name)
        unload = partial(unload_adapter, name=name, when_busy=when_busy, timeout_s=timeout_s)
        answers = await answers_of(replicas, unload)
        had = {replica: answer for replica, answer in answers.items() if not isinstance(answer, NotFoundError)}
        try:
            _check_any(had.values())
        except StagemeshError:
            if former is not None:
                self._remembered.remember(stage, name, former)
            raise
        if not had and former is None:
            raise NotFoundError(
                f"no replica of stage {stage!r} has adapter {name!r}",
                reason="UNKNOWN_ADAPTER",
                metadata={"stage": stage, "adapter": name},
            )
        return [_outcome(replica, answer) for replica, answer in had.items()]

    async def list(self, stage: str) -> list[admin_pb2.StageAdapter]:
        """Returns the adapters that the replicas of a stage have, in the order of their names.

        Omits replicas that do not answer. If no replica answers, raises the error of the first one.
        """
        replicas = self._replicas(stage)
        remembered = self._remembered.names(stage)
        found = {name: admin_pb2.StageAdapter(name=name, persistent=True) for name in remembered}
        answers = await answers_of(replicas, list_adapters)
        _check_any(answers.values())
        for replica, answer in answers.items():
            for adapter in () if isinstance(answer, StagemeshError) else answer:
                known = found.setdefault(adapter.name, admin_pb2.StageAdapter(name=adapter.name))
                known.replicas.append(_outcome(replica, adapter))
        return [found[name] for name in sorted(found)]

    def _replicas(self, stage: str) -> Sequence[Replica]:
        replicas = self._directory.replicas_of(stage)
        if not replicas:
            raise UnavailableError(
                f"stage {stage!r} has no replica; start one first", reason="STAGE_NOT_READY", metadata={"stage": stage}
            )
        return replicas


def _check_any(answers: Collection[object]) -> None:
    """Raises the first error if all answers are errors."""
    errors = [answer for answer in answers if isinstance(answer, StagemeshError)]
    if errors and len(errors) == len(answers):
        raise errors[0]


def _outcome(replica: Replica, answer: "control_pb2.Adapter | StagemeshError | None") -> admin_pb2.AdapterOutcome:
    if isinstance(answer, StagemeshError):
        return admin_pb2.AdapterOutcome(replica=replica.name, error=error_to_wire(answer))
    return admin_pb2.AdapterOutcome(replica=replica.name, adapter=answer)
