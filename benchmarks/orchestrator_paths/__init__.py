"""The processes and request paths that benchmarks of the orchestrator measure."""
