"""Tiny models with random weights, for tests and demos."""
