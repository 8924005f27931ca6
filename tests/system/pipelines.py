"""Pipeline files with fake stages for tests."""

from pathlib import Path

RELAYS = """\
pipeline: relays
stages:
  source: {{engine: fake, function: source, options: {{steps: {steps}, step_s: {step_s}, size_bytes: {size_bytes}}}}}
  relay: {{engine: fake, function: relay}}
  frames: {{engine: fake, function: frames{fail}}}
edges:
  - {{from: source, to: relay, connector: {connector}}}
  - {{from: relay, to: frames, connector: {connector}}}
outputs: {{text: source, frames: frames}}
limits: {{max_in_flight: {max_in_flight}, max_queued: {max_queued}}}
"""


def relays(
    folder: Path,
    *,
    steps: int = 10,
    step_s: float = 0.0,
    size_bytes: int = 20_000,
    connector: str = "auto",
    max_in_flight: int = 16,
    max_queued: int = 256,
    fail: str = "",
) -> Path:
    """Writes the pipeline source → relay → frames. `fail` is added to the definition of the last stage."""
    path = folder / "relays.yaml"
    path.write_text(
        RELAYS.format(
            steps=steps,
            step_s=step_s,
            size_bytes=size_bytes,
            connector=connector,
            max_in_flight=max_in_flight,
            max_queued=max_queued,
            fail=fail,
        )
    )
    return path
