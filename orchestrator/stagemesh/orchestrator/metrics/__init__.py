"""The metrics of an orchestrator, which Prometheus reads by HTTP."""
