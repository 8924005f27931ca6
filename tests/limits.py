"""Limits of this process that stand in for a lack of resources."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def files_of_at_most(size_bytes: int) -> Iterator[None]:
    """Makes writes of this process beyond a file size fail, as writes to a full disk do."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
