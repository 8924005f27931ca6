"""Who the replicas of a pipeline are: listed, found by name in DNS, or registered by themselves."""
