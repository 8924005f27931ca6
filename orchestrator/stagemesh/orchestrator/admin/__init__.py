"""Administration: reports the state of the orchestrator and its replicas, and executes the commands of operators."""
