"""The stage service: a replica that runs the steps of requests on an engine, and the gRPC services of the replica."""
