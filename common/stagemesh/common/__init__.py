"""Modules that every part of Stagemesh uses: errors, tensor types, settings, logging, process lifecycle."""
