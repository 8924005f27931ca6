"""Version numbers that two processes compare to determine whether the processes are compatible."""

WIRE_VERSION = 1
"""The version of the wire protocol. A replica with a different version is rejected."""
