"""Run-ahead limits: how far vLLM may compute a request."""
