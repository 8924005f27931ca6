"""Parallel workers: one model computed by several processes."""
