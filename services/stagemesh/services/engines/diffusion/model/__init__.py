"""Loading of models, the supported model families, and the phases of a pipeline."""
