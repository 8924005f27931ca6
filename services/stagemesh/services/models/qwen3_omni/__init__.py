"""Qwen3-Omni: the descriptors of its functions and transforms, and a tiny model of its structure."""
