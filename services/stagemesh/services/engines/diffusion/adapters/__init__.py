"""LoRA adapters for a diffusion transformer."""
