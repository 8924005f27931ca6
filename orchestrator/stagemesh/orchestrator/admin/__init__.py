"""Administration for operators: the status of the orchestrator and its replicas, and the commands that change them."""
