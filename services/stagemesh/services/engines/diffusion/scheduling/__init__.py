"""Step scheduling: selects the requests that run their next step together."""
