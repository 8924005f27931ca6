"""A set to draw from at random; adding, removing and drawing take the same time however many things it has."""

import random
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class RandomPool(Generic[T]):
    """Distinct, hashable items."""

    __slots__ = ("_items", "_places")

    def __init__(self) -> None:
        self._items: list[T] = []
        self._places: dict[T, int] = {}

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[T]:
        return iter(self._items)

    def __contains__(self, item: object) -> bool:
        return item in self._places

    def add(self, item: T) -> None:
        """Puts an item in; harmless where it is there."""
        if item not in self._places:
            self._places[item] = len(self._items)
            self._items.append(item)

    def discard(self, item: T) -> None:
        """Takes an item out; harmless where it is not there."""
        place = self._places.pop(item, None)
        if place is None:
            return
        last = self._items.pop()
        if place < len(self._items):
            self._items[place] = last
            self._places[last] = place

    def draw(self, count: int, rng: random.Random) -> list[T]:
        """So many different items, at random; all where there are no more."""
        if len(self._items) <= count:
            return list(self._items)
        return [self._items[place] for place in rng.sample(range(len(self._items)), count)]
