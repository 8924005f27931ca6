"""Tiny folders of the pipelines of diffusers."""
