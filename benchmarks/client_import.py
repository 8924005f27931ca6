"""Measures how long `import stagemesh.client` takes, and how much of that the packages take that it needs.

    python -m benchmarks.client_import --json out/bench-client-import.json

Each import runs in a new interpreter. The imports alternate. Figures are medians of the interpreter's processor time.
"""

import argparse
import statistics
import subprocess
import sys
from pathlib import Path

from benchmarks.report import Figure, report

_REPEATS = 15
_PACKAGES = "grpc.aio, numpy, google.protobuf.message"
_IMPORT = """
import time
began_s = time.process_time()
import {modules}
print(time.process_time() - began_s)
"""


def import_s(modules: str) -> float:
    """Returns the processor time of importing `modules` in a new interpreter, in seconds."""
    ran = subprocess.run([sys.executable, "-c", _IMPORT.format(modules=modules)], check=True, capture_output=True)
    return float(ran.stdout)


def main() -> None:
    """Reads the command line, measures, and reports."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="Write the figures to this file.")
    arguments = parser.parse_args()
    client, packages = (
        statistics.median(times)
        for times in zip(*((import_s("stagemesh.client"), import_s(_PACKAGES)) for _ in range(_REPEATS)), strict=True)
    )
    subject = "processor time of an import"
    figures = [
        Figure("stagemesh.client", client, "s", "<=0.2", subject),
        Figure(_PACKAGES, packages, "s", "", subject),
        Figure("stagemesh.client / its packages", client / packages, "ratio", "", subject),
    ]
    report("client_import", figures, json_file=arguments.json)


if __name__ == "__main__":
    main()
