"""The replicas of a pipeline: membership, states, the connections to them, and the connectors of their edges."""
