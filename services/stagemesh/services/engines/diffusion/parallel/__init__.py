"""Parallel execution: several worker processes that compute one step together."""
