"""The shell of a service process: its config, settings, logs, lifecycle and host."""
