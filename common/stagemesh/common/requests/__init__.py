"""Checks of a request's content, and the position of a receiver in its outputs."""
