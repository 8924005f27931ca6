"""Commands on pipeline files: check, draw, deploy, and fetch their models."""
