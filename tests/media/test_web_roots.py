"""Roots on web servers: a reference cannot leave them, however it is written, and wherever the server sends it."""

from pathlib import Path
from typing import Any

import pytest

from stagemesh.common.errors import PermissionDeniedError
from stagemesh.common.process.media_config import MediaConfig
from stagemesh.v1 import request_pb2
from tests.media.locations import Answering, failure, make_store, redirecting_server, running_server

ESCAPES = (
    *("%2e%2e/secret", "%2E%2e%2fsecret", "%252e%252e/secret", ".%2e/secret", "..%5csecret", "..\\secret"),
    *("\\..\\secret", "..;/secret", "a;/../secret", "a?/../../secret", "a#/../../secret", "@127.0.0.1/secret"),
    *("\uff0e\uff0e/secret", "a\u2025/secret", "..\u002f..%00/secret", "a/./../../secret", "a//../../secret"),
    ". ./secret",
)


class Requests:
    """The paths that a web server was asked for."""

    def __init__(self) -> None:
        self.paths: list[str] = []
        paths = self.paths

        class Handler(Answering):
            def do_GET(self) -> None:
                paths.append(self.path)
                super().do_GET()

        self.handler = Handler


@pytest.mark.parametrize("escape", ESCAPES)
async def test_a_reference_does_not_leave_a_root_on_a_web_server(tmp_path: Path, escape: str) -> None:
    requests = Requests()
    with running_server(requests.handler) as url:
        store = make_store(tmp_path, allowed=(f"{url}/public",))
        assert await failure(store, f"{url}/public/{escape}") == "REFERENCE_NOT_ALLOWED"
    assert requests.paths == []


@pytest.mark.parametrize("methods", [("HEAD",), ("GET",), ("HEAD", "GET")])
@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_redirections_are_not_followed(tmp_path: Path, status: int, methods: tuple[str, ...]) -> None:
    requests = Requests()
    with (
        running_server(requests.handler) as target,
        redirecting_server(f"{target}/secret", status=status, methods=methods) as url,
    ):
        options: Any = {"http": {"client_kwargs": {"headers": {"X-Own": "kept"}}}}
        store = make_store(tmp_path, allowed=(f"{url}/public",), storage_options=options)
        if methods == ("HEAD",):
            # The size is then taken from the answer to GET.
            (await store.fetch(request_pb2.MediaFile(uri=f"{url}/public/a.png"))).close()
        else:
            assert await failure(store, f"{url}/public/a.png") == "STORE_UNREACHABLE"
    assert requests.paths == []


@pytest.mark.parametrize("protocol", ["https", "webdav", "hf", "webhdfs", "custom"])
def test_unknown_libraries_receive_only_paths_that_they_cannot_decode(protocol: str) -> None:
    media = MediaConfig(allowed=(f"{protocol}://host:80/public",))
    assert media.located(f"{protocol}://host:80/public/a-b_c.~1+2.png").path == "host:80/public/a-b_c.~1+2.png"
    for escape in ESCAPES:
        with pytest.raises(PermissionDeniedError):
            media.located(f"{protocol}://host:80/public/{escape}")


def test_stores_that_do_not_decode_names_permit_all_of_them() -> None:
    media = MediaConfig(allowed=("s3://bucket/public", "/data"))
    assert media.located("s3://bucket/public/%2e%2e/ä b.png").path == "bucket/public/%2e%2e/ä b.png"
    assert media.located("file:///data/%2e%2e;?#/ä b.png").path == "/data/%2e%2e;?#/ä b.png"


ELSEWHERE = (
    *("simplecache::s3://bucket/a", "filecache::https://host/a", "zip://a.zip::file:///etc", "zip://a/b"),
    *("simplecache://a/b", "local:///etc", "asynclocal:///etc", "generic://a/b", "dir://a/b", "reference://a/b"),
    *("https://user:password@host/a", "https://host/a/%2e%2e", "https://host/a?b", "https://host/a;b"),
    "https://host\\@other/a",
)


@pytest.mark.parametrize("root", ELSEWHERE)
def test_roots_that_lead_elsewhere_are_refused(root: str) -> None:
    with pytest.raises(ValueError, match="is not a location; write an absolute folder, or a URL"):
        MediaConfig(allowed=(root,))
