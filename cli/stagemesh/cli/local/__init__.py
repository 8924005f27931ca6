"""Commands that start processes on this machine, or write what such processes need."""
