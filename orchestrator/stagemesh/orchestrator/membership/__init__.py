"""Determines the members of a pipeline: from the config, from DNS, or because the replicas register themselves."""
