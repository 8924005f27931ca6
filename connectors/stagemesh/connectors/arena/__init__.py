"""The arena: the shared memory of one replica, its allocator, and the writers that fill it."""
