"""Runs requests: validates, executes and recovers each request, and retains its outputs for callers."""
