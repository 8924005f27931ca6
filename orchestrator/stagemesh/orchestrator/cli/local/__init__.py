"""Commands that run pipelines or single processes on this machine, and their displays."""
