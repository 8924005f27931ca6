"""What all commands share: options, connections and contexts, output and errors."""
