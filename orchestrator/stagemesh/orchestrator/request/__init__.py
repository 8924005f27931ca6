"""Requests: from validation through running and recovery to the end."""
