"""Planning: which replica runs each stage of a request."""
