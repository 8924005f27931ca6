"""Things in the order of keys that change."""

import heapq
import itertools
from collections.abc import Hashable
from typing import Any, Generic, TypeVar

Item = TypeVar("Item", bound=Hashable)

_SLACK = 16


class Ranking(Generic[Item]):
    """Items by their keys, the least first; equal keys in the order in which they were put.

    O(log n) a change, amortised. Keys of one ranking must compare with each other.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[Any, int, Item]] = []
        self._current: dict[Item, tuple[Any, int, Item]] = {}
        """The one entry of each item that counts; others are left in the heap until they come up."""
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._current)

    def put(self, item: Item, key: object) -> None:
        """Adds the item, or moves it to where `key` belongs."""
        current = self._current.get(item)
        if current is not None and current[0] == key:
            return
        entry = self._current[item] = (key, next(self._numbers), item)
        heapq.heappush(self._heap, entry)
        self._compact()

    def discard(self, item: Item) -> None:
        """Takes the item out, if it is there."""
        if self._current.pop(item, None) is not None:
            self._compact()

    def first(self) -> Item | None:
        """The item with the least key, which stays; None where there is none."""
        while self._heap:
            entry = self._heap[0]
            if self._current.get(entry[2]) is entry:
                return entry[2]
            heapq.heappop(self._heap)
        return None

    def _compact(self) -> None:
        # What is left in the heap keeps whatever it belongs to, too.
        if len(self._heap) > 2 * len(self._current) + _SLACK:
            self._heap = list(self._current.values())
            heapq.heapify(self._heap)
