"""The replicas of a pipeline: their states, their connections, and the connectors of their edges."""
