"""Runs one orchestrator process: `python -m stagemesh.orchestrator --config FILE`."""

import argparse
import sys
from functools import partial
from pathlib import Path

from stagemesh.common.errors import InvalidRequestError
from stagemesh.common.process_lifecycle import run_service
from stagemesh.orchestrator.config import load_orchestrator_config
from stagemesh.orchestrator.service import serve

_EXIT_USAGE = 2


def main() -> int:
    """Serves the pipeline that the config file names until SIGTERM or SIGINT. Returns the process's exit status."""
    parser = argparse.ArgumentParser(prog="python -m stagemesh.orchestrator", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="Read the OrchestratorConfig from this JSON file.")
    try:
        config = load_orchestrator_config(parser.parse_args().config)
    except InvalidRequestError as exc:
        sys.stderr.write(f"{exc.message}\n")
        return _EXIT_USAGE
    return run_service(partial(serve, config), parent_pid=config.parent_pid)


if __name__ == "__main__":
    sys.exit(main())
