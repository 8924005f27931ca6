"""The built-in engines, one folder for each engine.

Each folder contains a descriptor with few imports and a factory. The factory imports the engine's dependencies.
"""
