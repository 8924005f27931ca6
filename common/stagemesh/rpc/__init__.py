"""gRPC code that all services and clients share: channels, message streams, servers, error mapping."""
