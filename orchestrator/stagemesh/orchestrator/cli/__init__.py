"""The command line: one module for each group of commands.

Commands import heavy modules inside their functions, so that the command line starts quickly.
"""
