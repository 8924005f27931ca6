"""Modules that all codec speech models share. These models consist of a codec language model and a vocoder."""
