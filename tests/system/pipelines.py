"""Pipeline files with fake stages for tests."""

from pathlib import Path

RELAYS = """\
pipeline: relays
stages:
  source: {{engine: fake, function: source, options: {{steps: {steps}, step_s: {step_s}, size_bytes: {size_bytes}}}}}
  relay: {{engine: fake, function: relay}}
  frames: {{engine: fake, function: frames}}
edges:
  - {{from: source, to: relay, connector: {connector}}}
  - {{from: relay, to: frames, connector: {connector}}}
outputs: {{text: source, frames: frames}}
"""


def relays(
    folder: Path, *, steps: int = 10, step_s: float = 0.0, size_bytes: int = 20_000, connector: str = "auto"
) -> Path:
    """Writes the pipeline source → relay → frames."""
    return pipeline_file(
        folder, RELAYS.format(steps=steps, step_s=step_s, size_bytes=size_bytes, connector=connector), name="relays"
    )


def pipeline_file(folder: Path, text: str, *, name: str = "pipeline") -> Path:
    """Writes a pipeline file with this text. Returns its path."""
    path = folder / f"{name}.yaml"
    path.write_text(text)
    return path
