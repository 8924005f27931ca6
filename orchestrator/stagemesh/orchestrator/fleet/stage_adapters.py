"""The adapters that operators have loaded for whole stages, and the restoration of them on replicas that start."""

import logging
from collections import defaultdict
from collections.abc import Sequence
from weakref import WeakKeyDictionary

from stagemesh.common.errors import StagemeshError
from stagemesh.orchestrator.fleet.replica import Replica
from stagemesh.v1 import control_pb2

_log = logging.getLogger(__name__)

_LOAD_S = 300.0
_LIST_S = 5.0
_PAGE = 1000


class StageAdapters:
    """The folders of the adapters that each replica of a stage is to have, by stage and adapter name.

    Nothing stores them: a new orchestrator process, or another orchestrator, adopts them from the replicas.
    """

    def __init__(self) -> None:
        self._paths: defaultdict[str, dict[str, str]] = defaultdict(dict)
        self._reported = WeakKeyDictionary[Replica, frozenset[str]]()
        """The names of the adapters in the latest report of each replica."""

    def path_of(self, stage: str, name: str) -> str | None:
        """Returns the folder of an adapter, or None if the replicas of the stage need not have the adapter."""
        return self._paths[stage].get(name)

    def remember(self, stage: str, name: str, path: str) -> None:
        self._paths[stage][name] = path

    def forget(self, stage: str, name: str) -> None:
        self._paths[stage].pop(name, None)

    def names(self, stage: str) -> list[str]:
        return list(self._paths[stage])

    def observe(self, replica: Replica) -> bool:
        """Compares the adapters that a replica reports with those of its previous report.

        Forgets those that the replica has unloaded, because an operator may have unloaded them through another
        orchestrator. Returns whether the replica has adapters that this orchestrator must `adopt`.
        """
        former, names = self._reported.get(replica, frozenset()), replica.adapters or frozenset()
        self._reported[replica] = names
        for name in former - names:
            self.forget(replica.stage, name)
        return any(self.path_of(replica.stage, name) is None for name in names - former)

    async def adopt(self, replica: Replica) -> None:
        """Remembers the adapters of a replica for the other replicas of its stage. Logs a failure."""
        try:
            adapters = await list_adapters(replica)
        except StagemeshError as exc:
            _log.warning("replica %s did not list its adapters: %s", replica.name, exc.message)
            return
        for adapter in adapters:
            if self.path_of(replica.stage, adapter.name) is None:
                self.remember(replica.stage, adapter.name, adapter.path)

    async def restore(self, replica: Replica) -> None:
        """Loads the adapters of the replica's stage that the replica does not have. Logs failures.

        Requests that need an adapter are placed on the replica after it has reported the adapter.
        """
        for name, path in list(self._paths[replica.stage].items()):
            try:
                await load_adapter(replica, name, path, timeout_s=_LOAD_S)
                if self.path_of(replica.stage, name) is None:
                    # An operator unloaded the adapter from the stage meanwhile.
                    await unload_adapter(replica, name, control_pb2.BUSY_POLICY_DRAIN, timeout_s=_LOAD_S)
            except StagemeshError as exc:
                _log.warning("replica %s did not load adapter %s again: %s", replica.name, name, exc.message)
            else:
                _log.info("replica %s has loaded adapter %s again", replica.name, name)


async def list_adapters(replica: Replica) -> Sequence[control_pb2.Adapter]:
    """Returns the adapters that a replica has loaded, in the order of their names."""
    adapters: list[control_pb2.Adapter] = []
    request = control_pb2.ListAdaptersRequest(page_size=_PAGE)
    while True:
        page = await replica.client.control(request, control_pb2.ListAdaptersResponse, timeout_s=_LIST_S)
        adapters += page.adapters
        request.page_token = page.next_page_token
        if not request.page_token:
            return adapters


async def load_adapter(replica: Replica, name: str, path: str, *, timeout_s: float) -> control_pb2.Adapter:
    """Loads an adapter on one replica, and returns its description. Does nothing if it is loaded already."""
    request = control_pb2.LoadAdapterRequest(name=name, path=path)
    return (await replica.client.control(request, control_pb2.LoadAdapterResponse, timeout_s=timeout_s)).adapter


async def unload_adapter(
    replica: Replica, name: str, when_busy: "control_pb2.BusyPolicy.ValueType", *, timeout_s: float
) -> None:
    """Unloads an adapter from one replica. Raises NotFoundError if the replica does not have it."""
    request = control_pb2.UnloadAdapterRequest(name=name, when_busy=when_busy)
    await replica.client.control(request, control_pb2.UnloadAdapterResponse, timeout_s=timeout_s)
