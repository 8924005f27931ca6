"""`stagemesh bench`: sends load to a running pipeline or to a server with OpenAI's API, and measures its answers."""
