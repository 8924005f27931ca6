"""Parts that all of Stagemesh shares: errors, tensor types, settings, logging, process lifecycle."""
