"""Built-in engines, one folder each: a light descriptor, and a factory that imports the engine's dependencies."""
