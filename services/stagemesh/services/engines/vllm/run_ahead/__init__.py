"""Run-ahead limits: how far vLLM may compute a request ahead of its inputs and of its consumer."""
