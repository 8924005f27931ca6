"""The gRPC services of a stage replica, and its registration with orchestrators."""
