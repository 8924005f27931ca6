"""The command line: one module a group of commands; what is heavy is imported inside the commands."""
