"""Media files: their types, suffixes and checks, and the encoders that make them."""
