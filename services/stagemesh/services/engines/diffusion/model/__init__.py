"""Diffusion models: loading, supported families, LoRA adapters, memory estimates, and the transformer calls that
several requests share.
"""
