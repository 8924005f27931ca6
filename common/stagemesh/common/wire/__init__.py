"""Values that processes exchange: tensors, the versions of the wire, and the telemetry of steps."""
