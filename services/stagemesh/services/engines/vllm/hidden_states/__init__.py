"""Hidden states: from vLLM's worker processes to the replica's arena, in order for each request."""
