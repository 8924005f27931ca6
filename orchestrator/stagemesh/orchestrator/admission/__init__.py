"""Admission control: limits running requests, queues further requests, and rejects requests if the queue is full."""
