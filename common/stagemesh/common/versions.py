"""Version numbers that two processes compare before they work together."""

WIRE_VERSION = 1
"""The version of the wire protocol. A replica of another wire version is rejected."""
