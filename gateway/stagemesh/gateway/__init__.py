"""The gateway: an HTTP service with OpenAI's API, which calls orchestrators as any other client does."""
