"""Images, audio and video in prompts: decoded, then processed by vLLM."""
