"""The members of a pipeline, from a list, from DNS, or registered by the replicas themselves."""
