"""The data plane: tensors from one replica's arena to another's engine, exactly once and in order."""
