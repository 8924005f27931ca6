"""The stage service: gRPC services that convert messages, and a replica that runs steps on an engine."""
