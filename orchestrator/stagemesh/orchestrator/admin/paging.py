"""Pages of lists."""

from collections.abc import Iterable
from itertools import islice
from typing import Generic, NamedTuple, TypeVar

from stagemesh.common.errors import InvalidRequestError

T = TypeVar("T")

DEFAULT_PAGE, MAX_PAGE = 100, 1000
_MOST_DIGITS = 19


class Page(NamedTuple, Generic[T]):
    """Some of a list; `next_token` is empty for the last page."""

    items: list[T]
    next_token: str


def page_of(numbered: Iterable[tuple[int, T]], *, size: int, token: str) -> Page[T]:
    """Those after `token`, at most `size` of them (0: DEFAULT_PAGE), of items in the order of their numbers, from 0.

    Raises InvalidRequestError (INVALID_PAGE_TOKEN) for a token that no page gave.
    """
    if token and not (token.isascii() and token.isdecimal() and len(token) <= _MOST_DIGITS):
        raise InvalidRequestError(
            f"page_token {token[:40]!r} is none that a list gave; leave it out to begin anew",
            reason="INVALID_PAGE_TOKEN",
        )
    after = int(token or -1)
    size = min(size or DEFAULT_PAGE, MAX_PAGE)
    found = list(islice((pair for pair in numbered if pair[0] > after), size + 1))
    page = found[:size]
    return Page([item for _, item in page], str(page[-1][0]) if len(found) > size else "")
