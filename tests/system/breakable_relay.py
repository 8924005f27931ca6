"""A relay to a service, whose connections a test can break."""

from collections.abc import Generator
from contextlib import contextmanager

from anyio.from_thread import BlockingPortal, start_blocking_portal

from stagemesh.conformance import Proxy, proxied


class BreakableRelay:
    """A proxy in its own thread. Clients can connect again after a cut."""

    def __init__(self, portal: BlockingPortal, proxy: Proxy, endpoint: str) -> None:
        self.endpoint, self.targets = endpoint, proxy.targets
        self._portal, self._proxy = portal, proxy

    def cut(self) -> None:
        """Aborts every connection."""
        self._portal.call(self._proxy.cut)


@contextmanager
def breakable_relay(*targets: str) -> Generator[BreakableRelay]:
    """Runs a relay within the block. Its connections lead to the targets in turn."""
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(proxied(*targets)) as (proxy, endpoint):
        yield BreakableRelay(portal, proxy, endpoint)
