"""Determines which replicas are members of a pipeline.

The sources of members are the addresses in the orchestrator's config, DNS names, and the registrations of replicas.
"""
