"""The stage in C++ computes the digests of the protocol's test vectors."""

import subprocess

from tests.cpp.programs import EXAMPLE, ROOT, require_stage


def test_digests_and_texts_are_those_of_the_vectors() -> None:
    require_stage()
    subprocess.run([EXAMPLE / "build/vectors_test", ROOT / "protos/vectors/digest.json"], check=True)
