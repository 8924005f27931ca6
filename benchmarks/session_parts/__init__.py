"""The parts of the benchmark of sessions: idle sessions, and sessions that speak."""
