"""Parallel execution: several worker processes compute one model together."""
