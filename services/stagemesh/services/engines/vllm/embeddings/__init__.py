"""Embeddings from upstream stages that enter a prompt while its request runs."""
