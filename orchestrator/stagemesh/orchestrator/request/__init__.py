"""Runs requests, from validation through recovery to the end, and keeps what they produce for their callers."""
