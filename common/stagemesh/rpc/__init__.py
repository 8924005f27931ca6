"""Shared gRPC code of all services and clients: channels, message streams, servers and error mapping."""
