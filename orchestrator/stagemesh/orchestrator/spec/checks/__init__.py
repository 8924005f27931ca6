"""The checks that a pipeline file must pass."""
