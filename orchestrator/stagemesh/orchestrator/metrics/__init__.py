"""The metrics of an orchestrator, the scaling signals, and the warm tier of sleeping replicas."""
