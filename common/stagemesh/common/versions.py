"""Version numbers that two processes compare to determine whether they are compatible."""

WIRE_VERSION = 1
"""The version of the wire protocol. A replica with another version is rejected."""
