"""Pipeline files as text: YAML with line numbers, variables and overrides."""
