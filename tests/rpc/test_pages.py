"""The pages of a list that changes while it is paged."""

import base64

from hypothesis import given
from hypothesis import strategies as st

from stagemesh.common.errors import InvalidRequestError
from stagemesh.rpc.pages import Key, page_of
from stagemesh.v1 import admin_pb2, orchestrator_pb2
from tests.rpc.call_errors import raises

_KEYS = st.frozensets(st.tuples(st.integers(0, 3), st.text("ab/é", max_size=2)), max_size=12)


def _page(keys: "list[Key]", *, token: str = "", size: int = 2) -> tuple[list[str], str]:
    items = ((key, orchestrator_pb2.ReplicaStatus(name=str(key))) for key in sorted(keys))
    request = admin_pb2.ListReplicasRequest(page_size=size, page_token=token)
    page = page_of(admin_pb2.ListReplicasResponse, request, field="replicas", items=items)
    return [replica.name for replica in page.replicas], page.next_page_token


@given(lasting=_KEYS, passing=st.lists(_KEYS, min_size=1, max_size=6), size=st.integers(1, 4))
def test_lasting_items_are_listed_once_while_others_come_and_go(
    lasting: frozenset[Key], passing: list[frozenset[Key]], size: int
) -> None:
    seen, token, turn = list[str](), "", 0
    while token or turn == 0:
        keys = [*(lasting | passing[turn % len(passing)])]
        names, token = _page(keys, token=token, size=size)
        seen, turn = seen + names, turn + 1
    assert [name for name in seen if name in set(map(str, lasting))] == list(map(str, sorted(lasting)))
    assert len(seen) == len(set(seen))


def test_a_page_continues_after_an_item_that_is_gone() -> None:
    names, token = _page([(0, "a"), (0, "b"), (0, "c"), (0, "d")])
    assert names == ["(0, 'a')", "(0, 'b')"]
    assert _page([(0, "a"), (0, "c"), (0, "d")], token=token) == (["(0, 'c')", "(0, 'd')"], "")


def test_items_with_the_same_key_share_a_page() -> None:
    names, token = _page([(0, "a"), (0, "a"), (0, "b")], size=1)
    assert names == ["(0, 'a')", "(0, 'a')"]
    assert _page([(0, "a"), (0, "a"), (0, "b")], token=token, size=1) == (["(0, 'b')"], "")


def test_the_token_of_another_list_is_rejected() -> None:
    _, token = _page([("a",), ("b",)], size=1)
    nested = base64.urlsafe_b64encode(b"[" * 100_000 + b"]" * 100_000).decode()
    for each in (token, nested):
        with raises(InvalidRequestError, reason="INVALID_PAGE_TOKEN"):
            _page([(0,), (1,)], token=each)
