"""Rows of tensors, one for each token position, that vLLM's workers and the replica exchange through shared memory:
embeddings, hidden states, and the input and output rows of codec language models.
"""
