"""Step scheduling: which request runs its next step, and with which others."""
