"""LoRA adapters: the registry of loaded adapters, and the reading of their files."""
