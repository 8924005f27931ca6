"""One step of a stage, from its spec to the end of its flows."""
