"""Batching: shared forward passes for the transformer calls of several requests."""
