from pathlib import Path

import pytest

from stagemesh.common.errors import InvalidPipelineError
from stagemesh.pipeline import Pipeline, load_pipeline

EYE = """\
pipeline: eye
media:
  store: /data/media
  allowed: [file:///data/public]
stages:
  eye: {engine: fake, function: look}
outputs: {text: eye}
"""


def load(folder: Path, text: str, *, check_models: bool = True) -> Pipeline:
    path = folder / "eye.yaml"
    path.write_text(text)
    return load_pipeline(str(path), check_models=check_models)


def test_media_names_the_store_and_further_locations(tmp_path: Path) -> None:
    media = load(tmp_path, EYE).media
    assert media is not None
    assert media.roots == ("/data/media", "file:///data/public")
    assert media.max_file_bytes == 1 << 30
    assert media.uri_of("uploads", "a.png") == "file:///data/media/uploads/a.png"


def test_a_pipeline_has_no_store_by_default(tmp_path: Path) -> None:
    text = EYE.replace("  store: /data/media\n  allowed: [file:///data/public]\n", "").replace("media:\n", "")
    assert load(tmp_path, text).media is None


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("/data/media", "media", ":3: media.store is 'media'; 'media' is not a location; write an absolute folder"),
        ("/data/media", "/data/../media", ":3: media.store is '/data/../media'"),
        ("/data/media", "file://data", ":3: media.store is 'file://data'"),
        ("/data/media", "s3://", ":3: media.store is 's3://'"),
        ("file:///data/public", "s3://a/../b", ":4: media.allowed.0 is 's3://a/../b'"),
        ("file:///data/public", "foo://bucket", ":4: fsspec does not know foo://"),
        ("store: /data/media", "stores: /data/media", ":3: unknown key 'media.stores'; did you mean 'store'?"),
        ("store: /data/media", "max_file_bytes: 0", ":3: media.max_file_bytes is 0"),
        ("store: /data/media", "storage_options: {s3: {}}", ":3: no location of media has the protocol 's3'"),
        (
            "  store: /data/media\n  allowed: [file:///data/public]\n",
            "  max_file_bytes: 9\n",
            ":2: media names no location; add `store:",
        ),
    ],
)
def test_a_mistake_is_reported_with_its_line(tmp_path: Path, old: str, new: str, problem: str) -> None:
    assert old in EYE
    with pytest.raises(InvalidPipelineError) as caught:
        load(tmp_path, EYE.replace(old, new))
    assert problem in caught.value.message


def test_only_the_machine_that_runs_the_stages_needs_the_packages(tmp_path: Path) -> None:
    text = EYE.replace("/data/media", "foo://bucket/prefix")
    media = load(tmp_path, text, check_models=False).media
    assert media is not None
    assert media.uri_of("a") == "foo://bucket/prefix/a"
