"""Support for emitting hidden states, which a vLLM worker process writes into the replica's arena."""
