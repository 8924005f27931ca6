"""The built-in engines. Each engine's folder contains a descriptor with few imports and a factory.

The factory imports the engine's dependencies.
"""
