"""The responses that a gateway keeps in memory for requests that continue them."""

import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stagemesh.gateway.config import GatewayConfig
from stagemesh.gateway.limits import Shares

_ENTRY_BYTES = 512
"""The memory of a response, or of an item, without its JSON."""


@dataclass
class StoredResponse:
    """A response that has ended, as JSON."""

    response: bytes
    input: Sequence[bytes]
    """The items of the request that asked for it."""
    output: Mapping[str, bytes]
    """The items that the model made, by id."""
    previous_id: str | None
    is_private: bool = False
    """Whether only further responses can use it: the response was not to be stored, and its WebSocket is open."""
    expires_s: float = 0.0
    """The time on the monotonic clock from which it is not used any more."""

    @property
    def items(self) -> Sequence[bytes]:
        """The items of the request, and those that the model made."""
        return [*self.input, *self.output.values()]

    @property
    def size_bytes(self) -> int:
        """The memory of the response."""
        return sum(_ENTRY_BYTES + len(part) for part in (self.response, *self.items))


class ResponseStore:
    """Stores the responses of callers, each for a time after its last use. Other gateways do not know them.

    One caller may use half of the memory that the others leave. Its least recently used responses are dropped for new
    ones.
    """

    def __init__(self, config: GatewayConfig) -> None:
        self.running: dict[tuple[str, str], Callable[[], Awaitable[dict[str, Any]]]] = {}
        """The functions that cancel the responses of running streams and return them, by owner and id."""
        self._shares, self._ttl_s = Shares(config.max_responses_bytes), config.response_ttl_s
        self._stored = OrderedDict[tuple[str, str], StoredResponse]()
        """The responses by owner and id, the least recently used first."""
        self._items: dict[tuple[str, str], bytes] = {}
        """The items of outputs, by owner and id."""

    def add(self, owner: str, response_id: str, stored: StoredResponse) -> bool:
        """Stores a response. Returns False if it exceeds the share of its owner."""
        self._drop_expired()
        while not self._shares.hold(owner, stored.size_bytes):
            oldest = next((key for key in self._stored if key[0] == owner), None)
            if oldest is None:
                return False
            self.delete(*oldest)
        self._stored[owner, response_id] = stored
        self._items |= {(owner, item_id): item for item_id, item in stored.output.items()}
        self._touch(owner, response_id)
        return True

    def find(self, owner: str, response_id: str) -> StoredResponse | None:
        """Returns a response of an owner, or None if there is none with this id."""
        self._drop_expired()
        return self._stored.get((owner, response_id))

    def find_item(self, owner: str, item_id: str) -> bytes | None:
        """Returns an item of the output of an owner's responses, or None if there is none with this id."""
        self._drop_expired()
        return self._items.get((owner, item_id))

    def context(self, owner: str, response_id: str | None) -> list[StoredResponse] | None:
        """Returns a response and those that it continues, the first one first. None if one of them does not exist.

        This is a use of all of them.
        """
        found = list[tuple[str, StoredResponse]]()
        while response_id is not None:
            if (stored := self.find(owner, response_id)) is None:
                return None
            found.append((response_id, stored))
            response_id = stored.previous_id
        for each, _ in reversed(found):
            self._touch(owner, each)
        return [stored for _, stored in reversed(found)]

    def delete(self, owner: str, response_id: str) -> bool:
        """Deletes a response of an owner. Returns whether there was one with this id."""
        stored = self._stored.pop((owner, response_id), None)
        if stored is None:
            return False
        self._shares.hold(owner, -stored.size_bytes)
        for item_id in stored.output:
            del self._items[owner, item_id]
        return True

    def _touch(self, owner: str, response_id: str) -> None:
        self._stored.move_to_end((owner, response_id))
        self._stored[owner, response_id].expires_s = time.monotonic() + self._ttl_s

    def _drop_expired(self) -> None:
        while self._stored and next(iter(self._stored.values())).expires_s <= time.monotonic():
            self.delete(*next(iter(self._stored)))
