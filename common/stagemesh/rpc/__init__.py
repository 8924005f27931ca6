"""gRPC plumbing that every service and client shares: channels, message streams, servers, error mapping."""
