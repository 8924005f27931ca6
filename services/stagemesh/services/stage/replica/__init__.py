"""The replica of a stage: its running steps, its controls, its load, and hang detection."""
