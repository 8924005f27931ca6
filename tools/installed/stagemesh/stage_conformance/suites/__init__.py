"""The cases, in the order of the checklist in docs/protocol.md."""

from importlib import import_module

_SUITES = (
    *("joining", "steps", "calls", "outputs", "rebinding", "consumer", "streams", "credit", "unknown_kinds"),
    *("producer", "broken_connections", "exchanges", "vectors", "hostile"),
)


def register_cases() -> None:
    """Imports the modules of this package, which adds their cases to `CASES`."""
    for name in _SUITES:
        import_module(f"{__name__}.{name}")
