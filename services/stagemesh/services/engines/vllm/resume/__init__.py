"""Resumes requests from a checkpoint."""
