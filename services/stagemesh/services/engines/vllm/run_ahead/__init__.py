"""Run-ahead limits: the distance by which vLLM may compute a request ahead of its inputs and its consumer."""
