"""LoRA adapters for a diffusion transformer: reading, loading and activating them."""
