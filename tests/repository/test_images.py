"""The images without torch install little, and nothing that they do not import."""

import zipfile
from importlib.metadata import distribution
from pathlib import Path

import pytest
from requirements.lock import read

from k8s.images.remove_unused import is_unused

MAX_INSTALLED_BYTES = 125_000_000
"""The size of what an orchestrator's image installs, without compiled modules of Python.

With those, the base and less debug information, the image then stays below `k8s.cluster.images.MAX_ORCHESTRATOR_BYTES`.
"""


@pytest.mark.parametrize(
    ("path", "unused"),
    [
        ("numpy/_core/tests/test_array.py", True),
        ("numpy/f2py/cfuncs.py", True),
        ("numpy/_core/_simd.cpython-311-x86_64-linux-gnu.so", True),
        ("numpy/__init__.pyi", True),
        ("pygments/lexers/ruby.py", True),
        ("pygments/lexers/__pycache__/ruby.cpython-311.pyc", True),
        ("numpy/__init__.py", False),
        ("numpy/_core/_multiarray_umath.cpython-311-x86_64-linux-gnu.so", False),
        ("pygments/lexers/__init__.py", False),
        ("pygments/lexers/__pycache__/_mapping.cpython-311.pyc", False),
        ("stagemesh/common/py.typed", False),
    ],
)
def test_images_leave_out_exactly_what_they_do_not_import(path: str, unused: bool) -> None:
    assert is_unused(path) == unused


def test_the_image_of_an_orchestrator_installs_little(built_wheel: Path) -> None:
    files = {file for name in read("orchestrator.txt") for file in distribution(name).files or ()}
    packages = [Path(str(file.locate())) for file in files if file.suffix != ".pyc" and not is_unused(str(file))]
    ours = sum(file.file_size for file in zipfile.ZipFile(built_wheel).infolist())
    assert sum(file.stat().st_size for file in packages if file.is_file()) + ours <= MAX_INSTALLED_BYTES
