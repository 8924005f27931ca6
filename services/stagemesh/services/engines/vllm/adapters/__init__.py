"""LoRA adapters of a running vLLM engine."""
