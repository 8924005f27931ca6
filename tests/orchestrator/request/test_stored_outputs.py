"""Stored outputs of a request: the objects that the orchestrator names for the stages."""

from collections.abc import AsyncIterator
from pathlib import Path

from stagemesh.common.errors import UnavailableError
from stagemesh.v1 import orchestrator_pb2, request_pb2, stage_pb2
from tests.orchestrator.mesh import CHAIN, mesh
from tests.orchestrator.scripted_stage import ACCEPTED, FINISHED, Response, ScriptedStage

_RAW = "application/octet-stream"
_STORED = CHAIN.replace("first: a", f"first: {{from: a, media_type: {_RAW}, stored: true}}")
_END = request_pb2.Finish(reason=request_pb2.FINISH_REASON_END)


def _pipeline(folder: Path) -> str:
    return f"{_STORED}media: {{store: {folder / 'store'}}}\n"


class _Moves:
    """Runs a stage that is moved to another replica once, before or after it has reported its stored file."""

    def __init__(self, *, reports_first: bool) -> None:
        self.reports_first = reports_first
        self.asked: list[list[stage_pb2.StreamedOutput]] = []

    async def __call__(self, stage: ScriptedStage, request: stage_pb2.ExecuteStepRequest) -> AsyncIterator[Response]:
        self.asked.append(list(request.streamed))
        is_first = len(self.asked) == 1
        yield ACCEPTED
        if request.streamed and (self.reports_first or not is_first):
            file = request_pb2.MediaFile(uri=request.streamed[0].uri, size_bytes=1)
            yield Response(output=request_pb2.Output(name="text", file=file, finish=_END))
        if is_first:
            raise UnavailableError("moves", reason="DRAINED", metadata={"stage": stage.name})
        yield FINISHED


def _files(events: list[orchestrator_pb2.GenerateResponse]) -> list[str]:
    return [event.output.file.uri for event in events if event.output.HasField("file")]


async def test_each_attempt_stores_an_object_of_its_own(tmp_path: Path) -> None:
    script = _Moves(reports_first=False)
    async with mesh(tmp_path, _pipeline(tmp_path), scripts={"a": script}, replicas=2) as chain:
        files = _files(await chain.generate(request_id="r"))
    first, second = [streamed.uri for (streamed,) in script.asked]
    folder, _, name = first.rpartition("/")
    assert folder.startswith(f"file://{tmp_path}/store/outputs/r.")
    assert (name, second) == ("first.1.bin", f"{folder}/first.2.bin")
    assert files == [second]
    assert {streamed.media_type for (streamed,) in script.asked} == {_RAW}


async def test_a_restarted_stage_does_not_store_again_what_the_client_has(tmp_path: Path) -> None:
    script = _Moves(reports_first=True)
    async with mesh(tmp_path, _pipeline(tmp_path), scripts={"a": script}, replicas=2) as chain:
        files = _files(await chain.generate())
    assert [len(asked) for asked in script.asked] == [1, 0]
    assert files == [script.asked[0][0].uri]


async def test_two_runs_of_a_request_store_different_objects(tmp_path: Path) -> None:
    uris: list[str] = []
    for _ in range(2):
        async with mesh(tmp_path, _pipeline(tmp_path)) as chain:
            await chain.generate(request_id="r")
            uris.append(chain.stages["a"].requests[0].streamed[0].uri)
    assert uris[0] != uris[1]
