"""Step caches, which skip computations of a step, and the cache of prompt embeddings."""
