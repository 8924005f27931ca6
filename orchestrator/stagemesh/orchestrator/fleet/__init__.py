"""The replicas of a pipeline: their states, the connections to them, and the connectors of the edges between them."""
