"""Streams between two replicas: connections, sessions, connector negotiation, and chunk messages."""
