"""Control of the LoRA adapters of a running vLLM engine."""
