"""Step caches, which skip parts of a step's computation, and the cache of prompt embeddings."""
