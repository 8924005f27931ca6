"""Reads the text of pipeline files: YAML with line numbers, variables and overrides."""
