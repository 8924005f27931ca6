"""Diffusion models: loading, supported model families, LoRA adapters, memory estimates and the phases of a pipeline."""
