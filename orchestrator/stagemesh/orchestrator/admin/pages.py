"""The pages of lists. A page token is the key of the page's last item, so that a list may change while it is paged."""

import base64
from collections.abc import Iterable
from typing import Any, TypeAlias, TypeVar

from google.protobuf.message import Message
from pydantic import TypeAdapter

from stagemesh.common.errors import InvalidRequestError

Key: TypeAlias = tuple[int | str, ...]
"""The position of an item in its list. It does not change while the item exists."""
_Response = TypeVar("_Response", bound=Message)

_DEFAULT_SIZE, _MAX_SIZE = 100, 1000
_KEYS: TypeAdapter[Key] = TypeAdapter(Key)


def page_of(response: type[_Response], request: Any, *, field: str, items: Iterable[tuple[Key, Message]]) -> _Response:
    """Returns a response of the type `response` with the page of a list that `request` selects.

    - `field` is the name of the response field that contains the items.
    - `items` are pairs of a key and an item, in ascending order of the keys. Items with the same key are always on the
      same page, even if it then has more than `request.page_size` items.

    Raises InvalidRequestError (INVALID_PAGE_TOKEN) if the request's token does not contain a key of this list.
    """
    token = str(request.page_token)
    after = _key_of(token)
    size = min(request.page_size or _DEFAULT_SIZE, _MAX_SIZE)
    page: list[Message] = []
    last: Key = ()
    next_token = ""
    for key, item in items:
        try:
            if key <= after:
                continue
        except TypeError:
            # The token is from a list with other keys.
            raise _invalid(token) from None
        if len(page) >= size and key != last:
            next_token = _token_of(last)
            break
        page.append(item)
        last = key
    return response(next_page_token=next_token, **{field: page})


def _token_of(key: Key) -> str:
    return base64.urlsafe_b64encode(_KEYS.dump_json(key)).decode().rstrip("=")


def _key_of(token: str) -> Key:
    try:
        return _KEYS.validate_json(base64.urlsafe_b64decode(token + "=" * (-len(token) % 4))) if token else ()
    except ValueError:
        raise _invalid(token) from None


def _invalid(token: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"page_token {token[:40]!r} is not from a previous page of this list; omit it to start with the first page",
        reason="INVALID_PAGE_TOKEN",
    )
