"""Request transfer: serializes a request's state so that another stage or replica can resume the request."""
