"""The load generator of `stagemesh bench`."""
