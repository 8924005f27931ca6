"""Request transfer: serialization of a request's state, so that another stage or replica can resume the request."""
