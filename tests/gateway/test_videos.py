import tempfile
from collections.abc import AsyncGenerator, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import httpx
import openai
import pytest
from PIL import Image

from stagemesh.client import Job
from stagemesh.client.jobs import to_job
from stagemesh.gateway.routes import videos as route
from stagemesh.v1 import jobs_pb2
from tests.deployment import Deployment, deployed, eventually
from tests.gateway.making import client
from tests.pictures import encoded_image
from tests.system.pipelines import pipeline_file

# The client warns that OpenAI ends its own service.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The Sora API is scheduled:DeprecationWarning"),
    pytest.mark.timeout(180),
]

LABELS, QUEUED = {"openai_object": "video"}, jobs_pb2.JOB_STATE_QUEUED
PIPELINE = """\
pipeline: film
stages:
  viewer: {{engine: fake, function: look, options: {{step_s: 0.01}}}}
  camera: {{engine: fake, function: video, options: {{frame_side: 32}}}}
edges: [{{from: viewer, to: camera}}]
outputs:
  script: viewer
  film: {{from: camera, media_type: video/mp4, frame_rate: 24{stored}}}
media: {{store: {store}}}
"""


@pytest.fixture(scope="module", params=["", ", stored: true"], ids=["sent", "stored"])
def up(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    folder = tmp_path_factory.mktemp("film")
    path = pipeline_file(folder, PIPELINE.format(stored=request.param, store=folder / "store"))
    (folder / "store").mkdir()
    with deployed(path, "--jobs", "--gateway", "127.0.0.1:0", home=folder / "home") as up:
        yield up


@pytest.fixture
def videos(up: Deployment) -> Iterator[openai.resources.Videos]:
    with client(f"http://{up.statuses['gateway']['endpoint']}") as made:
        yield made.videos


PICTURE = ("reference.png", encoded_image(Image.new("RGB", (8, 8), (200, 0, 0))))


def completed(videos: openai.resources.Videos, video_id: str) -> openai.types.Video:
    eventually(lambda: videos.retrieve(video_id).status in {"completed", "failed"}, timeout_s=30)
    return videos.retrieve(video_id)


def test_a_video_is_made_of_a_picture_and_read(videos: openai.resources.Videos) -> None:
    created = videos.create(model="film", prompt="a boat", input_reference=PICTURE)
    assert (created.object, created.model, created.prompt) == ("video", "film", "a boat")
    assert created.status in {"queued", "in_progress"}
    video = completed(videos, created.id)
    assert (video.status, video.progress, video.error) == ("completed", 100, None)
    assert video.completed_at is not None
    assert video.expires_at is not None
    content = videos.download_content(video.id)
    assert content.response.headers["content-type"] == "video/mp4"
    assert content.read()[4:8] == b"ftyp"


@pytest.fixture(scope="module")
def content(up: Deployment) -> Iterator[tuple[str, bytes]]:
    """Returns the URL of a video, and its bytes."""
    with client(url := f"http://{up.statuses['gateway']['endpoint']}") as ai:
        video = completed(ai.videos, ai.videos.create(model="film", prompt="a boat", input_reference=PICTURE).id)
        yield f"{url}/v1/videos/{video.id}/content", ai.videos.download_content(video.id).read()


@pytest.mark.parametrize(
    ("wanted", "begin", "end"),
    [("0-9", 0, 10), ("5-", 5, None), ("-7", -7, None), ("3-999999999", 3, None), ("-999999999", 0, None)],
)
@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_a_range_of_a_video_is_read(
    content: tuple[str, bytes], method: str, wanted: str, begin: int, end: int | None
) -> None:
    url, whole = content
    answer = httpx.request(method, url, headers={"range": f"bytes={wanted}"})
    part = whole[begin:end]
    first = begin % len(whole)
    assert answer.status_code == 206
    assert answer.headers["content-range"] == f"bytes {first}-{first + len(part) - 1}/{len(whole)}"
    assert int(answer.headers["content-length"]) == len(part)
    assert answer.content == (b"" if method == "HEAD" else part)


BAD_RANGES = ("", "-", "9-2", "a-b", "0-1,5-6", "1000000000-", "-0", "0-\u0662", "9" * 5000 + "-")


@pytest.mark.parametrize("wanted", [*BAD_RANGES, "0x0-9", " 0-1", "0--1", "+0-1"])
def test_a_bad_range_is_rejected_and_leaves_no_file(content: tuple[str, bytes], wanted: str) -> None:
    url, whole = content
    for method in ("GET", "HEAD"):
        answer = httpx.request(method, url, headers={b"range": f"bytes={wanted}".encode()})
        assert answer.status_code == 416
        assert answer.headers["content-range"] == f"bytes */{len(whole)}"
    assert not list(Path(tempfile.gettempdir()).glob("video-*"))


def test_a_range_that_does_not_apply_is_ignored(content: tuple[str, bytes]) -> None:
    url, whole = content
    tag = httpx.head(url).headers["etag"]
    for headers, status in (
        ({"range": "lines=1-2"}, 200),
        ({"range": "bytes=0-1", "if-range": '"other"'}, 200),
        ({"range": "bytes=0-1", "if-range": tag}, 206),
    ):
        answer = httpx.get(url, headers=headers)
        assert (answer.status_code, answer.content) == (status, whole if status == 200 else whole[:2])


def test_videos_are_listed_in_pages_and_deleted(videos: openai.resources.Videos) -> None:
    ids = [videos.create(model="film", prompt=prompt, input_reference=PICTURE).id for prompt in ("one", "two")]
    assert [video.id for video in list(videos.list(limit=1))[:2]] == ids[::-1]
    assert [video.id for video in videos.list(order="asc")][-2:] == ids
    for video_id in ids:
        assert videos.delete(video_id).deleted
        with pytest.raises(openai.NotFoundError):
            videos.retrieve(video_id)


@pytest.mark.parametrize(
    ("order", "after", "ids", "most"),
    [("desc", None, "987", 6), ("desc", "7", "654", 8), ("asc", "5", "678", 6), ("asc", None, "012", 10)],
)
async def test_a_list_of_videos_reads_only_the_jobs_that_it_needs(
    order: Literal["asc", "desc"], after: str | None, ids: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = list[int]()

    async def jobs(numbers: range) -> AsyncGenerator[Job]:
        for number in numbers:
            read.append(number)
            yield to_job(jobs_pb2.Job(job_id=str(number), state=QUEUED, created_s=number, labels=LABELS))

    async def models(_request: object) -> list[Any]:
        lists = (partial(jobs, range(first, -1, -2)) for first in (8, 9))
        return [SimpleNamespace(client=SimpleNamespace(jobs=SimpleNamespace(list=each))) for each in lists]

    monkeypatch.setattr(route, "_models", models)
    request: Any = None
    page = await route.list_videos(request, after, 3, order)
    assert "".join(each["id"] for each in page["data"]) == ids
    assert page["has_more"]
    assert len(read) <= most


def test_wrong_requests_for_videos_name_their_mistakes(videos: openai.resources.Videos) -> None:
    with pytest.raises(openai.BadRequestError, match="seconds"):
        videos.create(model="film", prompt="a boat", seconds="4")
    with pytest.raises(openai.BadRequestError, match="WIDTHxHEIGHT"):
        videos.create(model="film", prompt="a boat", extra_body={"size": "large"})
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        videos.create(model="other", prompt="a boat")
    with pytest.raises(openai.NotFoundError, match="no video has the id"):
        videos.download_content("missing")


def test_a_failed_video_has_its_error(videos: openai.resources.Videos) -> None:
    created = videos.create(model="film", prompt="a boat", extra_body={"negative_prompt": "rain"})
    video = completed(videos, created.id)
    assert video.status == "failed"
    assert video.error is not None
    assert video.error.code == "unsupported"
    with pytest.raises(openai.BadRequestError, match="failed"):
        videos.download_content(created.id)
