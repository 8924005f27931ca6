"""The arena: a replica's memory for tensors, its allocator, and the writers that fill it."""
