"""LoRA adapters in a running vLLM engine."""
