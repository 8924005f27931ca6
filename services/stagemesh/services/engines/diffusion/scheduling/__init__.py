"""Scheduling of denoising steps: admits requests, and selects the requests that run their next steps together."""
