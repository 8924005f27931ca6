"""Models: loading, families, and the phases of a pipeline."""
