"""Measures the memory that a large stored output costs the processes of a pipeline.

    python -m benchmarks.media_outputs --json out/bench-media-outputs.json
    AWS_ENDPOINT_URL=http://127.0.0.1:9000 python -m benchmarks.media_outputs --store s3://bucket/prefix

A deployed pipeline stores 1 GiB of video frames, as raw bytes and as an encoded video. The growth of a process is its
highest memory during the request, minus its memory after a request of one chunk.
"""

import argparse
import tempfile
from pathlib import Path

from benchmarks.memory import growth
from benchmarks.report import Figure, report
from tests.deployment import Deployment, deployed

_PIPELINE = """
pipeline: film
stages:
  writer: {{engine: fake, function: source, options: {{size_bytes: {frames}}}}}
  camera: {{engine: fake, function: video, options: {{frame_side: {side}}}}}
edges: [{{from: writer, to: camera}}]
outputs:
  frames: {{from: camera, media_type: {media_type}, stored: true{rate}}}
media: {{store: {store}}}
"""
_SIDE, _FRAMES = 1024, 16
_CHUNK_BYTES = _FRAMES * _SIDE * _SIDE * 3
_CHUNKS = -(-(1 << 30) // _CHUNK_BYTES)
_MIB = 1 << 20


def store_frames(deployment: Deployment, *, chunks: int) -> int:
    """Runs a request that stores frames, and returns the size of the stored file in bytes."""
    with deployment.client() as client:
        (file,) = client.generate("hello", max_tokens=chunks).result().files["frames"]
    return file.size_bytes


def measure_stored(media_type: str, *, store: str | None) -> list[Figure]:
    """Measures the orchestrator and the stage while the stage stores 1 GiB of frames in this media type.

    `store` is the URL of the store, or None for a temporary folder.
    """
    rate = ", frame_rate: 24" if media_type.startswith("video/") else ""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "film.yaml")
        root = store or Path(folder, "store")
        file.write_text(_PIPELINE.format(frames=_FRAMES, side=_SIDE, media_type=media_type, rate=rate, store=root))
        with deployed(file) as deployment:
            process_ids = {name: deployment.process_id(name) for name in ("orchestrator", "camera-0")}
            store_frames(deployment, chunks=1)
            with growth(process_ids) as grown:
                size_bytes = store_frames(deployment, chunks=_CHUNKS)
    subject = f"{_CHUNKS} chunks of {_CHUNK_BYTES // _MIB} MiB of frames stored as {media_type}" + (
        f" in {store}" if store else ""
    )
    return [
        Figure("the stored file", size_bytes / _MIB, "MiB", "", subject),
        Figure("growth of the orchestrator", grown("orchestrator") / _MIB, "MiB", "<=16", subject),
        Figure("growth of the stage", grown("camera-0") / _CHUNK_BYTES, "chunks", "<=2", subject),
    ]


def main() -> None:
    """Reads the command line, measures, and reports."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="Write the figures to this file.")
    parser.add_argument("--store", metavar="URL", help="Store the files here. Default: a folder that is deleted.")
    arguments = parser.parse_args()
    media_types = ("application/octet-stream", "video/mp4")
    figures = [figure for each in media_types for figure in measure_stored(each, store=arguments.store)]
    report("media_outputs", figures, json_file=arguments.json)


if __name__ == "__main__":
    main()
