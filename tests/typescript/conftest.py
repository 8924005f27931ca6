import shutil

import pytest

from tests.typescript.nodes import EXAMPLE, PACKAGE


@pytest.fixture(scope="session", autouse=True)
def _built() -> None:
    """Skips the tests without node. Fails them if the programs are not built, or older than their sources."""
    if shutil.which("npm") is None:
        pytest.skip("needs node and npm: install Node.js 20 or later, then run `make typescript`")
    stamp, patterns = EXAMPLE / "dist" / ".stamp", ("src/*.ts", "src/stage/*.ts", "src/session/*.ts")
    sources = [source for folder in (EXAMPLE, PACKAGE) for pattern in patterns for source in folder.glob(pattern)]
    is_built = stamp.exists() and all(source.stat().st_mtime <= stamp.stat().st_mtime for source in sources)
    assert is_built, "clients/typescript or examples/typescript is not built: run `make typescript`"
