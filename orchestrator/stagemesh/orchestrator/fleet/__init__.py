"""The fleet: which replicas exist, whether they are ready, and connections to them."""
