"""Converts stage configs and deploy configs of vLLM-Omni to pipeline files."""
