"""Images, audio and video in prompts. They are decoded here, then processed by vLLM."""
