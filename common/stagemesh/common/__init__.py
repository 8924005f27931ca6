"""Modules that all parts of Stagemesh share, such as errors, tensor types, settings, logging and process lifecycle."""
