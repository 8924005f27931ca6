"""Batching: transformer calls of several requests joined into shared forward passes."""
