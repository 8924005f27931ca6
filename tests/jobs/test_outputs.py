"""The outputs of a job: which are in its description, and which are files."""

from pathlib import Path

import pytest

from stagemesh.client import Text
from stagemesh.jobs.outputs import AttemptOutputs
from tests.media.locations import make_store

INLINE_BYTES = 64 << 10
"""The longest text in a job's description."""


@pytest.mark.parametrize(("size_bytes", "files"), [(INLINE_BYTES, 0), (INLINE_BYTES + 2, 1)])
async def test_a_long_text_is_a_file(tmp_path: Path, size_bytes: int, files: int) -> None:
    text = "é" * (size_bytes // 2)
    (folder := tmp_path / "store").mkdir()
    async with AttemptOutputs(make_store(tmp_path), folder="j", spool=tmp_path / "audio") as outputs:
        for part in (text[:1000], text[1000:]):
            await outputs.add(Text("said", part))
        (output,) = await outputs.commit()
        outputs.keep()
    written = [path.read_text() for path in folder.rglob("said*.txt")]
    assert (output.text, written, len(output.files)) == ("" if files else text, [text] * files, files)
