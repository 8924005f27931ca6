"""One step of a stage: its spec, its run, its flows, and its events."""
