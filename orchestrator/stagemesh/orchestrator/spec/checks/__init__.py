"""Checks that a pipeline file must pass."""
