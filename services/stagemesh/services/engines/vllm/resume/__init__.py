"""Requests that resume from a checkpoint."""
