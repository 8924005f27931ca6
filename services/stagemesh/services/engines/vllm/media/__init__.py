"""Support for images, audio and video in prompts. The replica decodes the media, then vLLM processes them."""
