"""Commands that inspect and control a running pipeline."""
