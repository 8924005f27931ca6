"""Runs a soak by hand: `python -m tests.soak --seconds 600 --seed 7 --kinds kill,stop --json out/soak.json`."""

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path

from tests.soak.faults import FaultKind
from tests.soak.soak import Plan, soak


def main() -> int:
    """Runs a soak. Returns the exit status, which is 0 if it passes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=110.0, help="of faults")
    parser.add_argument("--faults", type=int, default=1_000_000, help="at most")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--clients", type=int, default=Plan.clients)
    parser.add_argument("--kinds", default=",".join(kind.value for kind in FaultKind), help="separated by commas")
    parser.add_argument("--at-once", type=int, default=1, help="the most processes that are hit at the same time")
    parser.add_argument("--json", type=Path, help="write all that was found there")
    options = parser.parse_args()
    plan = Plan(
        kinds=[FaultKind(name) for name in options.kinds.split(",") if name],
        seed=options.seed,
        faults=options.faults,
        faults_s=options.seconds,
        clients=options.clients,
        most_at_once=options.at_once,
    )
    with tempfile.TemporaryDirectory() as folder:
        report = asyncio.run(soak(Path(folder), plan))
    print(report.summary())
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(report.json())
    return bool(report.problems())


if __name__ == "__main__":
    sys.exit(main())
