"""Support for prompt embeddings from an upstream stage, which may arrive while the request runs."""
