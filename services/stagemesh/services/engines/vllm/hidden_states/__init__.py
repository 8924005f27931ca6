"""Transfers hidden states from vLLM's worker process through the replica's arena, in the order of the tokens."""
