"""Support for checkpoints: emits checkpoints of requests and resumes requests from them."""
