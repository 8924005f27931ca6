"""The unit tests of the stage in TypeScript, which digest the test vectors of the protocol."""

import json
import subprocess
from pathlib import Path

from tests.typescript.nodes import EXAMPLE, program


def test_digest_passes_the_test_vectors() -> None:
    node, _ = program("upper")
    command = [node, "--test", "--test-reporter=tap", str(EXAMPLE / "dist" / "stage" / "digest.test.js")]
    report = subprocess.run(command, check=True, capture_output=True, text=True, timeout=30).stdout
    vectors = json.loads(Path("protos/vectors/digest.json").read_text())
    assert f"# pass {len(vectors)}" in report
