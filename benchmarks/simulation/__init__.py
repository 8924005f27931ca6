"""What `benchmarks.simulate` runs the orchestrator in: virtual time, and stages that only pretend to compute."""
