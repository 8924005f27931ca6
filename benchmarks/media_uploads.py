"""Measures the memory that a large upload, and a request that refers to it, cost the processes of a pipeline.

    python -m benchmarks.media_uploads --json out/bench-media-uploads.json

The processes are the real ones of `stagemesh up`, with a fake engine that reads the file. The memory is the resident
memory of a process without the pages of files. Its growth is the highest memory during the upload and the request,
minus the memory after a small upload and request.
"""

import argparse
import asyncio
import hashlib
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from benchmarks.memory import growth
from benchmarks.report import Figure, report
from stagemesh.cli.launcher import Launcher
from stagemesh.client import AsyncClient, MediaFile
from stagemesh.pipeline import load_pipeline

_PIPELINE = """
pipeline: uploads
media: {{store: {folder}/store}}
stages:
  eye: {{engine: fake, function: look}}
outputs: {{text: eye}}
"""
_MIB = 1 << 20
_NAMES = {"orchestrator": "orchestrator", "media": "media service", "eye-0": "stage"}


async def measure(*, size_bytes: int) -> tuple[Mapping[str, float], float]:
    """Returns the growth of each process's memory in bytes, and the duration of the upload in seconds."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "uploads.yaml").write_text(_PIPELINE.format(folder=folder))
        launcher = Launcher(load_pipeline(str(folder / "uploads.yaml")), listen="127.0.0.1:0")
        async with launcher.running():
            await launcher.wait_ready()
            async with AsyncClient(launcher.endpoint) as client:
                await _upload_and_look(client, folder / "small.mp4", size_bytes=_MIB)
                process_ids = {name: launcher.processes[name].process_id or 0 for name in _NAMES}
                with growth(process_ids) as grown:
                    upload_s = await _upload_and_look(client, folder / "large.mp4", size_bytes=size_bytes)
                return {name: grown(name) for name in _NAMES}, upload_s


async def _upload_and_look(client: AsyncClient, path: Path, *, size_bytes: int) -> float:
    block, digest = os.urandom(_MIB), hashlib.sha256()
    with path.open("wb") as file:
        for _ in range(size_bytes // _MIB):
            file.write(block)
            digest.update(block)
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    stored: MediaFile = await client.upload(path)
    upload_s = loop.time() - began_s
    result = await client.generate([stored, "what is it?"]).result()
    assert digest.hexdigest() in result.texts["text"], "the engine has read another file"
    return upload_s


def main() -> None:
    """Reads the command line, measures, and reports."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="Write the figures to this file.")
    parser.add_argument("--mib", type=int, default=100, help="Upload a file of this size, in MiB.")
    arguments = parser.parse_args()
    size_bytes = arguments.mib * _MIB
    grown, upload_s = asyncio.run(measure(size_bytes=size_bytes))
    subject = f"a file of {arguments.mib} MiB"
    figures = [
        Figure(f"memory of the {label}", grown[name] / _MIB, "MiB", "<=16", subject) for name, label in _NAMES.items()
    ]
    figures.append(Figure("upload", size_bytes / _MIB / upload_s, "MiB/s", "", subject))
    report("media_uploads", figures, json_file=arguments.json)


if __name__ == "__main__":
    main()
