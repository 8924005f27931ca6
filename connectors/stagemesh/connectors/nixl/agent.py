"""The border to the nixl library: agents, and its errors as ours. Imports the library, so import it late.

The library's own wrapper is passed by: it fixes the progress thread to a busy loop, and prints.
"""

from nixl_cu12 import _bindings as nixl

from stagemesh.common.errors import UnavailableError
from stagemesh.connectors.nixl.environment import backend_options, unavailable
from stagemesh.connectors.nixl.transfer_plan import Memory, Transfer

PROGRESS_US = 50_000
"""The longest that a serving agent's thread sleeps; what a peer sends wakes it at once."""
_BACKEND = "UCX"
_KINDS = {"DRAM": nixl.nixl_mem_t.DRAM_SEG, "VRAM": nixl.nixl_mem_t.VRAM_SEG}
_READ = nixl.nixl_xfer_op_t.NIXL_READ
_IN_PROGRESS = nixl.nixl_status_t.NIXL_IN_PROG
_ERRORS = (
    nixl.nixlBackendError,
    nixl.nixlCancelledError,
    nixl.nixlInvalidParamError,
    nixl.nixlMismatchError,
    nixl.nixlNotAllowedError,
    nixl.nixlNotFoundError,
    nixl.nixlNotPostedError,
    nixl.nixlNotSupportedError,
    nixl.nixlRemoteDisconnectError,
    nixl.nixlRepostActiveError,
    nixl.nixlUnknownError,
)


class Agent:
    """An agent with one piece of registered memory. Used by one thread at a time, but for a serving agent's own.

    `serves` gives it a thread (outside Python) that answers readers where the transport cannot do it by itself.
    """

    def __init__(self, name: str, memory: Memory, *, serves: bool) -> None:
        """Raises NotReadyError (CONNECTOR_UNAVAILABLE) where the library finds no way to work."""
        self.name = name
        self._kind = _KINDS[memory.kind]
        try:
            self._agent = nixl.nixlAgent(name, _config(serves=serves))
            self._backends = [self._agent.createBackend(_BACKEND, backend_options())]
            piece = (memory.address, memory.size_bytes, memory.device, "")
            self._agent.registerMem(nixl.nixlRegDList(self._kind, [piece]), self._backends)
            self.metadata = self._agent.getLocalMD()
        except _ERRORS as exc:
            raise unavailable(f"nixl cannot start here: {exc!r}") from exc

    def close(self) -> None:
        """Ends all connections; nothing that was under way writes any more. Nothing else may be called afterwards."""
        del self._agent

    def add_peer(self, name: str, metadata: bytes) -> None:
        """Gets to know another agent. Raises NotReadyError where the metadata is not that agent's."""
        # Its name stands first, as it does in our own: that of another agent would replace what we know of it.
        before = self.metadata.index(self.name.encode()) - 8
        if not metadata.startswith(self.metadata[:before] + len(name.encode()).to_bytes(8, "little") + name.encode()):
            raise unavailable(f"the metadata offered for agent {name} is not its own, or of another nixl version")
        try:
            self._agent.loadRemoteMD(metadata)
        except _ERRORS as exc:
            raise unavailable(f"agent {name} is out of reach: {exc!r}") from exc

    def remove_peer(self, name: str) -> None:
        """Forgets another agent. None of its transfers may be under way: they would write on unseen."""
        try:
            self._agent.invalidateRemoteMD(name)
        except _ERRORS:
            return

    def read(self, peer: str, transfer: Transfer) -> int | None:
        """Starts to read; returns a handle for `is_done`, or None where it is done already. Raises UnavailableError."""
        local, remote = nixl.nixlXferDList(self._kind, transfer.local), nixl.nixlXferDList(self._kind, transfer.remote)
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
        """Whether a read is over, driving all that are under way. The handle is void then.

        Raises UnavailableError where it failed; then too nothing is written any more.
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
            # It is over in either case; the library keeps what it could not free.
            return


def _config(*, serves: bool) -> nixl.nixlAgentConfig:
    config = nixl.nixlAgentConfig()
    config.useProgThread, config.useListenThread = serves, False
    config.pthrDelay = PROGRESS_US
    config.syncMode = nixl.NIXL_THREAD_SYNC_STRICT
    return config


def _unreadable(peer: str, exc: Exception) -> UnavailableError:
    return UnavailableError(f"agent {peer} cannot be read from: {exc!r}")
