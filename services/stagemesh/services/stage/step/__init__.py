"""The execution of one step of a stage: its spec, its run, its edges, and its events."""
