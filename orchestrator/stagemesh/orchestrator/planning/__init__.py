"""Chooses the replica that runs each stage of a request."""
