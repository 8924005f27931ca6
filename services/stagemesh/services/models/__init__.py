"""The functions and transforms of models that ship with Stagemesh, and the download of their weights."""
