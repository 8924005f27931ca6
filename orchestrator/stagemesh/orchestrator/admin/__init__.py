"""The orchestrator and its replicas for operators: what they show, and the commands that they accept."""
