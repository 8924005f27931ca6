"""What operators see of an orchestrator and its replicas, and what they do about them."""
