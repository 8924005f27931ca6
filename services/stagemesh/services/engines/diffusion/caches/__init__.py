"""The caches of the diffusion engine: step caches, which skip parts of denoising steps, and the cache of prompt
embeddings.
"""
