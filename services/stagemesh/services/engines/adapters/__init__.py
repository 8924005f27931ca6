"""LoRA adapters: a manager for loaded adapters, and a reader for adapter files."""
