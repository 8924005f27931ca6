"""Request transfer: serializes a request's state for another stage or replica."""
