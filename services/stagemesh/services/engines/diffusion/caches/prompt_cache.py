"""What encoding a prompt has made, for when the same prompt comes again."""

from collections import OrderedDict
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

from stagemesh.services.engines.diffusion.transfer.serialization import tensors_of


@dataclass
class PromptCacheFigures:
    """Since the engine's start."""

    entries: int = 0
    size_bytes: int = 0
    hits: int = 0
    misses: int = 0


class PromptCache:
    """The latest used, up to a number of bytes. What is kept is shared by requests and never written to."""

    def __init__(self, limit_bytes: int) -> None:
        self.figures = PromptCacheFigures()
        self._limit_bytes = limit_bytes
        self._entries: OrderedDict[Hashable, tuple[Mapping[str, Any], int]] = OrderedDict()

    def get(self, key: Hashable) -> Mapping[str, Any] | None:
        """What was made of it; None where it is not known."""
        if not self._limit_bytes:
            return None
        entry = self._entries.get(key)
        if entry is None:
            self.figures.misses += 1
            return None
        self.figures.hits += 1
        self._entries.move_to_end(key)
        return entry[0]

    def put(self, key: Hashable, made: Mapping[str, Any]) -> None:
        """Keeps it, and lets those go that were not used for longest; what is larger than the cache is not kept."""
        size_bytes = sum(tensor.nbytes for value in made.values() for tensor in tensors_of(value))
        if size_bytes > self._limit_bytes or key in self._entries:
            return
        self._entries[key] = (made, size_bytes)
        self.figures.size_bytes += size_bytes
        while self.figures.size_bytes > self._limit_bytes:
            _, (_, freed_bytes) = self._entries.popitem(last=False)
            self.figures.size_bytes -= freed_bytes
        self.figures.entries = len(self._entries)

    def clear(self) -> None:
        """Forgets all."""
        self._entries.clear()
        self.figures.entries = self.figures.size_bytes = 0
