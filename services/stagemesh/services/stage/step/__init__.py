"""Steps: one step from its request to the end of its flows."""
