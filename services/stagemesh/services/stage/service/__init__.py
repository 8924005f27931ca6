"""The gRPC services of a stage replica, and the conversion between messages and domain types."""
