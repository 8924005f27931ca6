"""Transfers hidden states from vLLM's worker process through the replica's arena, in order for each request."""
