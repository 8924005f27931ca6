"""Step caches, which skip parts of the computation of denoising steps, and the cache of prompt embeddings."""
