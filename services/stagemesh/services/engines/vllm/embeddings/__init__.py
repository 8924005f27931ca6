"""Prompt embeddings from upstream stages. They may arrive while the request runs."""
