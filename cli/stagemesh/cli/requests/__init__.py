"""Commands that send requests to a pipeline, and show what it returns."""
