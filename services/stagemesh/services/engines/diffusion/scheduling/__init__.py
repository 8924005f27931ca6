"""Scheduling of denoising steps: the admission of requests, and the selection of the requests that run their next step
together.
"""
