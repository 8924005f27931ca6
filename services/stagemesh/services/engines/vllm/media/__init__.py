"""Support for images, audio and video in prompts. The replica decodes the media before vLLM processes them."""
