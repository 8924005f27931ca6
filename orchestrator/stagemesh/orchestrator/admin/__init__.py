"""The admin API for operators. Reports the state of an orchestrator and its replicas, and executes commands."""
