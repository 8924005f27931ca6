"""Version numbers that two processes compare before they work together."""

WIRE_VERSION = 1
"""The version of the wire protocol. Replicas with another wire version are rejected."""
