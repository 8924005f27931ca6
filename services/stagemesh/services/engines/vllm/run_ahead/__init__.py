"""Run-ahead limits: how far vLLM may compute a request ahead of the request's inputs and of its consumer."""
