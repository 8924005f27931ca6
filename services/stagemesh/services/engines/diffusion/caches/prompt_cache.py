"""A cache of prompt embeddings, so that a repeated prompt is not encoded again."""

from collections import OrderedDict
from collections.abc import Hashable, Mapping
from typing import Any

from stagemesh.services.engines.abilities import CacheStatistics
from stagemesh.services.engines.diffusion.transfer.serialization import tensors_of


class PromptCache:
    """A least-recently-used cache of prompt embeddings with a size limit in bytes.

    Requests share the cached values and must not modify them.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._entries: OrderedDict[Hashable, tuple[Mapping[str, Any], int]] = OrderedDict()
        self._size_bytes = self._hits = self._misses = 0

    @property
    def statistics(self) -> CacheStatistics:
        """The current size and the size limit of the cache in bytes, and its numbers of hits and misses since
        construction.
        """
        return CacheStatistics(
            entries=len(self._entries),
            size_bytes=self._size_bytes,
            limit_bytes=self._limit_bytes,
            hits=self._hits,
            misses=self._misses,
        )

    def get(self, key: Hashable) -> Mapping[str, Any] | None:
        """Returns the cached embeddings of a prompt, or None if the prompt is not cached."""
        if not self._limit_bytes:
            return None
        entry = self._entries.get(key)
        if entry is None:
            self._misses += 1
            return None
        self._hits += 1
        self._entries.move_to_end(key)
        return entry[0]

    def put(self, key: Hashable, values: Mapping[str, Any]) -> None:
        """Caches a prompt's embeddings. Evicts the least recently used prompts to stay within the size limit.

        Does nothing if the prompt is already cached or if the embeddings are larger than the limit.
        """
        size_bytes = sum(tensor.nbytes for value in values.values() for tensor in tensors_of(value))
        if size_bytes > self._limit_bytes or key in self._entries:
            return
        self._entries[key] = (values, size_bytes)
        self._size_bytes += size_bytes
        while self._size_bytes > self._limit_bytes:
            _, (_, freed_bytes) = self._entries.popitem(last=False)
            self._size_bytes -= freed_bytes

    def clear(self) -> CacheStatistics:
        """Removes all entries and returns the new statistics. Does not reset the numbers of hits and misses."""
        self._entries.clear()
        self._size_bytes = 0
        return self.statistics
