"""Fetches the models of a pipeline: `python -m stagemesh.services.models fetch PIPELINE [--force]`.

The exit status is 0 if all models are present when the command ends.
"""

import argparse
import signal
import sys
from collections.abc import Sequence
from types import FrameType

from rich.console import Console

from stagemesh.common.errors import StagemeshError
from stagemesh.common.settings import models_dir
from stagemesh.services.models.catalog import PIPELINES, recipes_of
from stagemesh.services.models.fetching import fetch
from stagemesh.services.models.progress import ProgressBars
from stagemesh.services.models.store import ModelStore

_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command `fetch` and returns its exit status."""
    options = _parser().parse_args(arguments)
    console = Console(stderr=True)
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        with ProgressBars(console) as bars:
            fetch(recipes_of(options.pipeline), store=ModelStore(models_dir()), reporter=bars, force=options.force)
    except StagemeshError as exc:
        console.print(f"error: {exc.message}", soft_wrap=True, highlight=False, markup=False)
        return 1
    except OSError as exc:
        console.print(f"error: {models_dir()}: {exc}", soft_wrap=True, highlight=False, markup=False)
        return 1
    except KeyboardInterrupt:
        console.print("interrupted; incomplete models were deleted", highlight=False)
        return _INTERRUPTED
    return 0


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m stagemesh.services.models", description="Fetch the models of a pipeline."
    )
    commands = parser.add_subparsers(required=True)
    fetching = commands.add_parser("fetch", help="Fetch the models that a pipeline needs.")
    fetching.add_argument("pipeline", help=f"The pipeline; one of: {', '.join(PIPELINES)}.")
    fetching.add_argument(
        "--force", action="store_true", help="Fetch and convert all models again; by default, present models are kept."
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
