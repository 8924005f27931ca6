"""Runs one replica of one stage: `python -m stagemesh.services.stage --config FILE`."""

import argparse
import sys
from functools import partial
from pathlib import Path

from stagemesh.common.errors import InvalidRequestError
from stagemesh.common.process_lifecycle import run_service
from stagemesh.common.stage_config import load_stage_config
from stagemesh.services.stage.process import serve

_EXIT_USAGE = 2


def main() -> int:
    """Serves a replica, which the config file describes, until SIGTERM or SIGINT. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m stagemesh.services.stage", description=__doc__)
    parser.add_argument(
        "--config",
        type=Path,
        required=True,
        help="Read the replica's config, a StageConfig as JSON, from this file. Required.",
    )
    try:
        config = load_stage_config(parser.parse_args().config)
    except InvalidRequestError as exc:
        sys.stderr.write(f"{exc.message}\n")
        return _EXIT_USAGE
    return run_service(partial(serve, config), parent_pid=config.parent_pid)


if __name__ == "__main__":
    sys.exit(main())
