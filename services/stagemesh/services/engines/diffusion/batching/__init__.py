"""Batching: computing the transformer calls of several requests in shared forward passes."""
