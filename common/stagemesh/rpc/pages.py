"""The pages of lists. A page token is the key of the page's last item, so a list may change while it is paged."""

import base64
import json
from collections.abc import Iterable
from typing import Any, TypeAlias, TypeVar, cast

from google.protobuf.message import Message

from stagemesh.common.errors import InvalidRequestError

Key: TypeAlias = tuple[int | str, ...]
"""The position of an item in its list. It does not change while the item exists."""

_DEFAULT_SIZE, _MAX_SIZE = 100, 1000
_ORIGIN = "a previous page of this list"

_Response = TypeVar("_Response", bound=Message)


def page_of(response: type[_Response], request: Any, *, field: str, items: Iterable[tuple[Key, Message]]) -> _Response:
    """Returns a response of the type `response` with the page of a list that `request` selects.

    - `field` is the name of the response field that contains the items.
    - `items` are pairs of a key and an item, in ascending order of the keys. Items with the same key are always on the
      same page, even if it then has more than `request.page_size` items.

    Raises InvalidRequestError (INVALID_PAGE_TOKEN) if the request's token does not contain a key of this list.
    """
    token = str(request.page_token)
    after, size = _key_of(token), size_of_page(request)
    page: list[Message] = []
    last: Key = ()
    next_token = ""
    for key, item in items:
        try:
            if key <= after:
                continue
        except TypeError:
            raise invalid_token(token, _ORIGIN) from None
        if len(page) >= size and key != last:
            next_token = _token_of(last)
            break
        page.append(item)
        last = key
    return response(next_page_token=next_token, **{field: page})


def size_of_page(request: Any) -> int:
    """Returns the maximum number of items on the page that a request for a list selects."""
    return min(request.page_size or _DEFAULT_SIZE, _MAX_SIZE)


def invalid_token(token: str, origin: str) -> InvalidRequestError:
    """Returns the error for a page token that is not from `origin`."""
    return InvalidRequestError(
        f"page_token {token[:40]!r} is not from {origin}; omit it to start with the first page",
        reason="INVALID_PAGE_TOKEN",
    )


def _token_of(key: Key) -> str:
    return base64.urlsafe_b64encode(json.dumps(key).encode()).decode().rstrip("=")


def _key_of(token: str) -> Key:
    try:
        key: object = json.loads(base64.urlsafe_b64decode(token + "=" * (-len(token) % 4))) if token else []
    except (ValueError, RecursionError):
        raise invalid_token(token, _ORIGIN) from None
    if not isinstance(key, list):
        raise invalid_token(token, _ORIGIN)
    return tuple(cast("list[int | str]", key))
