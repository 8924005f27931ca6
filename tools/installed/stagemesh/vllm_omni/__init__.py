"""`stagemesh pipeline import`: converts stage configs and deploy configs of vLLM-Omni to pipeline files."""
