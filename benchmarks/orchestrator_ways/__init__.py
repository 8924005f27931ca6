"""The processes of the orchestrator's benchmarks."""
