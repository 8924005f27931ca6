"""Processes that benchmarks of the orchestrator are made of."""
