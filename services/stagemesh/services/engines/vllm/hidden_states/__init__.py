"""Support for stages that emit hidden states. A vLLM worker process writes the hidden states into the
replica's arena.
"""
