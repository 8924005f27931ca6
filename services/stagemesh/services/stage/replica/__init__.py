"""The replica of a stage: its running steps, its operator controls, its load reports, and hang detection."""
