"""The data plane, which transfers tensors from one replica's arena to another replica's engine.

Each tensor arrives exactly once and in order.
"""
