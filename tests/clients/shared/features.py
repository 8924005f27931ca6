"""The end of each client in Python: runs its features and prints what went wrong in each, as JSON in one line."""

import asyncio
import json
import traceback
from collections.abc import Callable
from inspect import iscoroutinefunction
from typing import Any


def run_features(*features: Callable[[], Any]) -> None:
    """Calls functions that fail if a feature does not work. A feature has the name of its function."""
    problems = dict[str, str | None]()
    # Clients keep connections, which belong to one loop.
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    for feature in features:
        name = feature.__name__.replace("_", " ")
        try:
            loop.run_until_complete(feature()) if iscoroutinefunction(feature) else feature()
        except Exception as exc:  # noqa: BLE001 - a result of the client
            traceback.print_exc()
            line = traceback.extract_tb(exc.__traceback__)[-1].line
            problems[name] = f"{type(exc).__name__}: {str(exc) or line}"[:500]
        else:
            problems[name] = None
    print(json.dumps(problems))
