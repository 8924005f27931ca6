"""The orchestrator: plans each request across the stages of a pipeline and merges their outputs."""
