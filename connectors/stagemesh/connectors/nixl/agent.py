"""A wrapper for the agents of the nixl library. Converts the library's exceptions to StagemeshErrors.

Import this module lazily, because importing it loads the library. The module uses the library's low-level bindings,
because the library's Python wrapper prints messages and makes the progress thread busy-wait.
"""

from nixl_cu12 import _bindings as nixl

from stagemesh.common.errors import UnavailableError
from stagemesh.connectors.arena.arena import Arena
from stagemesh.connectors.base import unavailable
from stagemesh.connectors.nixl.environment import describe
from stagemesh.connectors.nixl.reads import Transfer

PROGRESS_US = 50_000
"""The maximum time in microseconds for which a serving agent's thread sleeps.

A message from a peer wakes the thread earlier.
"""
_BACKEND = "UCX"
_MEMORY = nixl.nixl_mem_t.DRAM_SEG
_READ = nixl.nixl_xfer_op_t.NIXL_READ
_IN_PROGRESS = nixl.nixl_status_t.NIXL_IN_PROG
_ERRORS = tuple(kind for kind in vars(nixl).values() if isinstance(kind, type) and issubclass(kind, Exception))
"""All error classes of the library."""


class Agent:
    """A nixl agent with one registered memory range. Only one thread at a time may use an agent.

    If `serves` is true, the agent also has a native thread. This thread answers READs if the transport requires an
    answer from the target.
    """

    def __init__(self, name: str, arena: Arena, *, serves: bool) -> None:
        """Creates the agent and registers the memory of `arena`.

        Raises NotReadyError (CONNECTOR_UNAVAILABLE) if the library cannot start on this host.
        """
        self.name = name
        try:
            self._agent = nixl.nixlAgent(name, _config(serves=serves))
            self._backends = [self._agent.createBackend(_BACKEND, {})]
            registration = (arena.address, arena.file_bytes, 0, "")
            self._agent.registerMem(nixl.nixlRegDList(_MEMORY, [registration]), self._backends)
            self.metadata = self._agent.getLocalMD()
        except _ERRORS as exc:
            raise unavailable(f"nixl cannot start here with {describe()}: {exc!r}") from exc

    def close(self) -> None:
        """Closes all connections and ends all transfers. No other method may be called afterwards."""
        del self._agent

    def add_peer(self, name: str, metadata: bytes) -> None:
        """Adds the agent `name` of another replica as a peer. `metadata` is the metadata that this agent has offered.

        Raises NotReadyError if the metadata belongs to a different agent, or if the agent is unreachable.
        """
        # Metadata begins with the name of its agent. Metadata of a third agent would replace the entry of that agent.
        before = self.metadata.index(self.name.encode()) - 8
        if not metadata.startswith(self.metadata[:before] + len(name.encode()).to_bytes(8, "little") + name.encode()):
            raise unavailable(f"the metadata offered for agent {name} belongs to another agent or nixl version")
        try:
            self._agent.loadRemoteMD(metadata)
        except _ERRORS as exc:
            raise unavailable(f"agent {name} is unreachable: {exc!r}") from exc

    def remove_peer(self, name: str) -> None:
        """Removes a peer. Call this method only when no transfer from the peer is in flight.

        A transfer in flight would continue to write to memory.
        """
        try:
            self._agent.invalidateRemoteMD(name)
        except _ERRORS:
            return

    def read(self, peer: str, transfer: Transfer) -> int | None:
        """Starts a READ transfer from the agent `peer`.

        Returns a handle for `is_done`, or None if the transfer is already complete. Raises UnavailableError if the
        transfer cannot be started.
        """
        local, remote = nixl.nixlXferDList(_MEMORY, transfer.local), nixl.nixlXferDList(_MEMORY, transfer.remote)
        handle = 0
        try:
            handle = self._agent.createXferReq(_READ, local, remote, peer, "", self._backends)
            status = self._agent.postXferReq(handle)
        except _ERRORS as exc:
            if handle:
                self._release(handle)
            raise _unreadable(peer, exc) from exc
        if status == _IN_PROGRESS:
            return handle
        self._release(handle)
        return None

    def is_done(self, handle: int, *, peer: str) -> bool:
        """Advances all transfers in flight. Returns whether the transfer with the handle `handle` is complete.

        Raises UnavailableError if the transfer has failed. After the transfer is complete or has failed, its handle is
        invalid, and the transfer no longer writes to memory.
        """
        try:
            status = self._agent.getXferStatus(handle)
        except _ERRORS as exc:
            self._release(handle)
            raise _unreadable(peer, exc) from exc
        if status == _IN_PROGRESS:
            return False
        self._release(handle)
        return True

    def _release(self, handle: int) -> None:
        try:
            self._agent.releaseXferReq(handle)
        except _ERRORS:
            # The transfer has ended even so. The library retains the resources that it could not free.
            return


def _config(*, serves: bool) -> nixl.nixlAgentConfig:
    config = nixl.nixlAgentConfig()
    config.useProgThread, config.useListenThread = serves, False
    config.pthrDelay = PROGRESS_US
    config.syncMode = nixl.NIXL_THREAD_SYNC_STRICT
    return config


def _unreadable(peer: str, exc: Exception) -> UnavailableError:
    return UnavailableError(f"agent {peer} cannot be read from: {exc!r}", reason="CONNECTOR_FAILED")
