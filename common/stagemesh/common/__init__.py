"""What every part of Stagemesh shares: errors, tensor types, settings, logging, process lifecycle."""
