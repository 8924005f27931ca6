"""Flows, which provide ordered exactly-once delivery, credit and retention at both ends of an edge."""
