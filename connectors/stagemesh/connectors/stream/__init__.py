"""Streams between two replicas, with their connections, sessions, connector negotiation, and chunk messages."""
