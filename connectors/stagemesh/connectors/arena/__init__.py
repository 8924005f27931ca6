"""The arena: a replica's preallocated memory for tensors, its page allocator, and the writer for worker processes."""
