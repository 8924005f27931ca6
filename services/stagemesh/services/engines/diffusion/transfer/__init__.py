"""Request transfer: a request's state serialized for another stage or replica."""
