import asyncio
import hashlib
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stagemesh.common.process.media_config import MediaConfig
from stagemesh.v1 import request_pb2, stage_pb2
from tests.media.locations import placed, web_server
from tests.rpc.call_errors import error_of
from tests.stage.replicas import Replica, served_stage, stage_config


@asynccontextmanager
async def looking_stage(folder: Path, *allowed: str, has_media: bool = True) -> AsyncGenerator[Replica]:
    media = MediaConfig(str(folder / "store"), allowed=allowed, max_file_bytes=100) if has_media else None
    async with served_stage(replace(stage_config(function="look"), media=media)) as replica:
        yield replica


def step(uri: str, *, request_id: str = "r", **fields: Any) -> stage_pb2.ExecuteStepRequest:
    file = request_pb2.MediaFile(uri=uri, media_type="image/png", **fields)
    parts = [request_pb2.Part(text="what is"), request_pb2.Part(image=file)]
    message = request_pb2.Message(role=request_pb2.ROLE_USER, parts=parts)
    return stage_pb2.ExecuteStepRequest(
        request_id=request_id,
        step_id=f"{request_id}/eye/1",
        attempt=1,
        input=request_pb2.Input(conversation=request_pb2.Conversation(messages=[message])),
        streamed=[stage_pb2.StreamedOutput(tensor="text")],
    )


async def text_of(replica: Replica, request: stage_pb2.ExecuteStepRequest) -> str:
    return "".join([event.output.text async for event in replica.stub.ExecuteStep(request, timeout=10)])


async def reason_of(replica: Replica, request: stage_pb2.ExecuteStepRequest, *, timeout_s: float = 10) -> str:
    return (await error_of(replica.stub.ExecuteStep(request, timeout=timeout_s), peer="stage")).reason


async def test_an_engine_reads_the_file_to_which_a_request_refers(tmp_path: Path) -> None:
    digest = hashlib.sha256(b"content").digest()
    async with looking_stage(tmp_path) as replica:
        text = await text_of(replica, step(placed(tmp_path), size_bytes=7, sha256=digest))
    assert text == f"image 7 {digest.hex()}\n"


@pytest.mark.parametrize(
    ("name", "fields", "reason"),
    [
        ("store/a.png", {"sha256": b"x" * 32}, "MEDIA_MISMATCH"),
        ("store/a.png", {"size_bytes": 8}, "MEDIA_MISMATCH"),
        ("store/none.png", {}, "UNKNOWN_MEDIA"),
        ("store/../a.png", {}, "REFERENCE_NOT_ALLOWED"),
        ("other/a.png", {}, "REFERENCE_NOT_ALLOWED"),
        ("store/large.png", {}, "FILE_TOO_LARGE"),
        ("store/empty.png", {}, "INVALID_MEDIA"),
    ],
)
async def test_an_invalid_reference_is_refused(tmp_path: Path, name: str, fields: dict[str, Any], reason: str) -> None:
    uri = placed(tmp_path)
    placed(tmp_path, "large.png", bytes(101))
    placed(tmp_path, "empty.png", b"")
    async with looking_stage(tmp_path) as replica:
        assert await reason_of(replica, step(f"file://{tmp_path}/{name}", **fields)) == reason
        assert await text_of(replica, step(uri, request_id="other"))


async def test_a_stage_without_a_store_rejects_references(tmp_path: Path) -> None:
    async with looking_stage(tmp_path, has_media=False) as replica:
        assert await reason_of(replica, step(placed(tmp_path))) == "UNSUPPORTED"


async def test_an_object_that_is_deleted_before_the_step_is_reported(tmp_path: Path) -> None:
    uri = placed(tmp_path)
    (tmp_path / "store" / "a.png").unlink()
    async with looking_stage(tmp_path) as replica:
        assert await reason_of(replica, step(uri)) == "UNKNOWN_MEDIA"


async def test_a_silent_store_is_bounded_by_the_deadline(tmp_path: Path) -> None:
    with web_server(None) as url:
        async with looking_stage(tmp_path, url) as replica:
            slow = asyncio.create_task(reason_of(replica, step(f"{url}/a.png", request_id="slow"), timeout_s=1))
            assert await text_of(replica, step(placed(tmp_path)))
            assert not slow.done()
            assert await slow == "DEADLINE_EXCEEDED"


async def test_an_unreachable_store_fails_the_request(tmp_path: Path) -> None:
    with web_server(b"") as url:
        pass
    async with looking_stage(tmp_path, url) as replica:
        assert await reason_of(replica, step(f"{url}/a.png")) == "STORE_UNREACHABLE"
