"""The replica of a stage: the steps that it runs, its controls, its load, and hang detection."""
