"""Compares the outputs of a pipeline with those of reference implementations."""
