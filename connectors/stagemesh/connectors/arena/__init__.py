"""The arena, which is a replica's memory for tensors, with its allocator and its writers."""
