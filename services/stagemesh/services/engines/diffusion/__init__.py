"""Diffusion models in steps: diffusers' pipelines cut into phases, so that requests may take turns at any step."""
