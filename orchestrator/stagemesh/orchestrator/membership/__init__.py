"""Determines which replicas are members of a pipeline.

The orchestrator's config lists replicas, a DNS name resolves to their addresses, or replicas register themselves.
"""
