"""Compares the outputs of a pipeline with the outputs of reference implementations."""
