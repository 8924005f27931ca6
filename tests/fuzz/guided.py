"""Fuzzes one reader of foreign data with atheris, guided by coverage.

    python -m tests.fuzz.guided chunks 600

Atheris is not installed with the other packages (`make fuzz` installs it). It prints and stores each input that fails.
"""

import importlib
import logging
import sys
import tempfile
from pathlib import Path
from typing import Any

atheris: Any = importlib.import_module("atheris")

with atheris.instrument_imports(include=["stagemesh"]):
    from tests.fuzz.targets import TARGETS, seeds


def main() -> None:
    """Fuzzes the target, the first argument of the program, for the number of seconds in the second argument."""
    target, seconds = sys.argv[1], int(sys.argv[2])
    logging.disable(logging.CRITICAL)
    corpus = Path(tempfile.mkdtemp(prefix=f"stagemesh-fuzz-{target}-"))
    for number, seed in enumerate(seeds(target)):
        (corpus / f"seed-{number}").write_bytes(seed)
    # A unit that needs more time or memory fails, too.
    limits = ["-timeout=20", "-rss_limit_mb=4096", "-max_len=16384", "-print_final_stats=1"]
    atheris.Setup([sys.argv[0], f"-max_total_time={seconds}", *limits, str(corpus)], TARGETS[target])
    atheris.Fuzz()


if __name__ == "__main__":
    main()
