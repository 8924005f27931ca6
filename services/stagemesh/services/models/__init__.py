"""The functions and transforms of the built-in models, and the download of their weights."""
