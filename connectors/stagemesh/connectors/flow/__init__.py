"""Flows between producers and consumers, with ordered exactly-once delivery, credit and retention of sent chunks."""
