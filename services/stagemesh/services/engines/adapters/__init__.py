"""LoRA adapters: the registry of loaded adapters, and a reader for adapter files."""
