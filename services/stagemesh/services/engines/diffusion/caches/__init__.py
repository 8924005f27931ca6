"""Caches: step caches and the prompt cache."""
