"""The orchestrator: plans each request over the stages of a pipeline, and merges the outputs of the stages."""
