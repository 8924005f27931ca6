"""Runs requests, from validation through recovery to the end, and retains their outputs for callers."""
