"""Writes packages with a stage."""
