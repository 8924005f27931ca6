"""The command line: one module for each group of commands. Heavy modules are imported inside the commands."""
