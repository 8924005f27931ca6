"""Flows, which provide ordered exactly-once delivery, credit and retention for producers and consumers."""
