"""Hands the KV cache of a prompt from a prefill stage to a decode stage, by vLLM's own NIXL connector.

`connector` runs in vLLM's engine core and its workers, `runner` in the workers, and `feature` in the replica's process.
"""
