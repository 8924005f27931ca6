"""Rows of tensors, one for each token position, that vLLM's workers and the replica exchange through shared memory."""
