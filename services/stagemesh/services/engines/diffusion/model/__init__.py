"""Diffusion models: loading, supported model families, memory estimates and the phases of a pipeline."""
