"""The options, connections, contexts, output and errors that all commands share."""
