"""Support for prompts that consist of embeddings from an upstream stage.

The embeddings may arrive while the request runs.
"""
