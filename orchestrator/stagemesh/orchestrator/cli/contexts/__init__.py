"""Named contexts: the addresses of deployments, stored in a file of the user."""
