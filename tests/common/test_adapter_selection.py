"""The adapters that a request selects, as a text."""

import pytest

from stagemesh.common.errors import InvalidRequestError
from stagemesh.common.requests.adapter_selection import parse_adapters


@pytest.mark.parametrize(
    ("text", "selected"),
    [("", ()), ("style", (("style", 1.0),)), ("a/b:c-1.0*0.8+light*-10", (("a/b:c-1.0", 0.8), ("light", -10.0)))],
)
def test_adapters_have_scales(text: str, selected: tuple[tuple[str, float], ...]) -> None:
    assert parse_adapters(text) == selected


@pytest.mark.parametrize("text", ["+", "a+", "*2", "a*", "a*x", "a*nan", "a*1e1", "a*10.5", "a*-11", "a*1*1", "a+b+a"])
def test_another_form_is_rejected(text: str) -> None:
    with pytest.raises(InvalidRequestError, match="write for example") as caught:
        parse_adapters(text)
    assert caught.value.reason == "INVALID_ADAPTER"
