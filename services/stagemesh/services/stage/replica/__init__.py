"""The replica: which steps it runs, its controls, its load, and hang detection."""
