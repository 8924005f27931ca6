"""The admin API: the state of an orchestrator and its replicas, and the commands of operators."""
