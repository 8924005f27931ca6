import io
from collections.abc import Iterator

import openai
import pytest
from PIL import Image

from tests.deployment import Deployment, deployed, eventually
from tests.gateway.making import client
from tests.system.pipelines import pipeline_file

# The client warns that OpenAI ends its own service.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The Sora API is scheduled:DeprecationWarning"),
    pytest.mark.timeout(180),
]

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


def picture() -> io.BytesIO:
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8), (200, 0, 0)).save(buffer, "PNG")
    buffer.name = "reference.png"
    return buffer


def completed(videos: openai.resources.Videos, video_id: str) -> openai.types.Video:
    eventually(lambda: videos.retrieve(video_id).status in {"completed", "failed"}, timeout_s=30)
    return videos.retrieve(video_id)


def test_a_video_is_made_of_a_picture_and_read(videos: openai.resources.Videos) -> None:
    created = videos.create(model="film", prompt="a boat", input_reference=picture())
    assert (created.object, created.model, created.prompt) == ("video", "film", "a boat")
    assert created.status in {"queued", "in_progress"}
    video = completed(videos, created.id)
    assert (video.status, video.progress, video.error) == ("completed", 100, None)
    assert video.completed_at is not None
    assert video.expires_at is not None
    content = videos.download_content(video.id)
    assert content.response.headers["content-type"] == "video/mp4"
    assert content.read()[4:8] == b"ftyp"


def test_videos_are_listed_in_pages_and_deleted(videos: openai.resources.Videos) -> None:
    ids = [videos.create(model="film", prompt=prompt, input_reference=picture()).id for prompt in ("one", "two")]
    assert [video.id for video in list(videos.list(limit=1))[:2]] == ids[::-1]
    assert [video.id for video in videos.list(order="asc")][-2:] == ids
    for video_id in ids:
        assert videos.delete(video_id).deleted
        with pytest.raises(openai.NotFoundError):
            videos.retrieve(video_id)


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
