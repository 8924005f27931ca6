"""LoRA adapters: which adapters an engine has loaded, and how their files are read."""
