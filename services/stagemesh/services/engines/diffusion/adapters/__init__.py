"""LoRA adapters on a diffusion transformer."""
