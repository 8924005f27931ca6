"""Measures the diffusion stage: an image step by step and through the gRPC service, against the pipeline's `__call__`.

The model uses Qwen-Image's real classes with two layers. Compared ways take turns, and a ratio is the median over
pairs. Steps and `__call__` run in this process and are also compared by the processor time of its only thread. The
stage is a separate process.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.diffusion_ways.calls import StageClient, begun, step
from benchmarks.report import Figure, report
from benchmarks.stage_process import StageProcess
from stagemesh.common.stage_config import StageConfig
from stagemesh.services.engines.diffusion.caches.prompt_cache import PromptCache
from stagemesh.services.engines.diffusion.model.modular import ModularStepPipeline
from tests.diffusion.tiny_calls import Wish, load, picture
from tests.diffusion.tiny_pipelines import write_qwen_image

MODEL = "qwen-image"
SIDE = 256
STEPS = 20
TOKENS = {64: 128, 256: 256}
"""The latent tokens of an image, and its side in pixels."""
TOGETHER = 4
SLOW_STEPS, SHORT_STEPS = 50, 4


def main() -> None:
    """Reads the command line, measures and reports."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--pairs", type=int, default=24, help="number of pairs of compared runs (default: %(default)s)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = write_qwen_image(folder / "model")
        classic = load(model)
        figures = _in_process(classic, model, pairs=arguments.pairs)
        staged = stack.enter_context(StageProcess(folder, _config(model)))
        client = StageClient(staged.endpoint)
        stack.callback(client.close)
        figures += _through_the_stage(classic, client, pairs=arguments.pairs)
    report("diffusion_stage", figures, json_file=arguments.json)


def _config(model: Path) -> StageConfig:
    return StageConfig(
        pipeline="benchmark",
        generation="1",
        stage="diffusion",
        replica="diffusion-0",
        engine="diffusion",
        listen="",
        model=str(model),
        # Prompts repeat here, and must cost as much as in `__call__`.
        options={"dtype": "float32", "max_running": 2 * TOGETHER, "prompt_cache_bytes": 0},
    )


def _square(side: int, steps: int, *, seed: int = 0, prompt: str = "a red cube on a table") -> Wish:
    return Wish(prompt, seed=seed, height=side, width=side, steps=steps)


def _in_process(classic: Any, model: Path, *, pairs: int) -> list[Figure]:
    pipeline = ModularStepPipeline(model, torch.float32)
    wish = _square(SIDE, STEPS)
    ours, theirs = (lambda: step(pipeline, wish)), (lambda: picture(MODEL, classic, wish))
    assert torch.equal(step(pipeline, wish), picture(MODEL, classic, wish)), "both ways make the same picture"
    wall = _ratio(ours, theirs, clock=time.perf_counter, pairs=pairs)
    processor = _ratio(ours, theirs, clock=time.thread_time, pairs=pairs)
    cached = ModularStepPipeline(model, torch.float32, prompt_cache=PromptCache(1 << 24))
    hit = _ratio(lambda: begun(cached, wish), lambda: begun(pipeline, wish), clock=time.perf_counter, pairs=pairs)
    where = f"{SIDE}x{SIDE}, {STEPS} steps, one process"
    return [
        Figure("step by step / __call__", wall, "ratio", "<=1.001", where),
        Figure("step by step / __call__, processor time", processor, "ratio", "", where),
        Figure("everything before the steps, prompt known / not", hit, "ratio", "<=0.9", where),
    ]


def _through_the_stage(classic: Any, client: StageClient, *, pairs: int) -> list[Figure]:
    wish = _square(SIDE, STEPS)
    client.draw(wish)
    served = _ratio(
        lambda: client.draw(wish), lambda: picture(MODEL, classic, wish), clock=time.perf_counter, pairs=pairs
    )
    where = "through the gRPC stage"
    figures = [Figure(f"{SIDE}x{SIDE}, {STEPS} steps, stage / __call__", served, "ratio", "<=1.02", where)]
    for tokens, goal in ((64, ">=1.4"), (256, ">=1.2")):
        gain = _gain(client, side=TOKENS[tokens], pairs=pairs // 3)
        what = f"{TOGETHER} at once / one after the other, {tokens} latent tokens, pictures a second"
        figures.append(Figure(what, gain, "ratio", goal, where))
    late = _lateness(client, shorts=pairs // 2)
    what = f"a {SHORT_STEPS}-step request beside one of {SLOW_STEPS}: late at the median, in its own steps"
    figures.append(Figure(what, statistics.median(late), "steps", "<=2", where))
    figures.append(Figure("the same, at most", max(late), "steps", "", where))
    return figures


def _ratio(
    ours: Callable[[], object], theirs: Callable[[], object], *, clock: Callable[[], float], pairs: int
) -> float:
    """Returns the median over pairs. The two ways take turns in going first."""

    def taken(work: Callable[[], object]) -> float:
        began = clock()
        work()
        return clock() - began

    ratios = list[float]()
    for number in range(pairs):
        if number % 2:
            first = taken(ours)
            ratios.append(first / taken(theirs))
        else:
            first = taken(theirs)
            ratios.append(taken(ours) / first)
    return statistics.median(ratios)


def _gain(client: StageClient, *, side: int, pairs: int) -> float:
    """Returns the gain in images per second if several are requested at once."""
    wishes = [_square(side, STEPS, seed=seed, prompt="a red cube " * (1 + seed)) for seed in range(TOGETHER)]
    # Warms the stage up until it has measured which batch size is fastest.
    for _ in range(4):
        client.draw_all(wishes)
    return statistics.median(_alone(client, wishes) / client.draw_all(wishes) for _ in range(max(3, pairs)))


def _alone(client: StageClient, wishes: Sequence[Wish]) -> float:
    return sum(client.draw(wish) for wish in wishes)


def _lateness(client: StageClient, *, shorts: int) -> list[float]:
    """Returns the delay of each short request compared with a run alone, in steps of the request."""
    short, slow = _square(SIDE, SHORT_STEPS), _square(SIDE, SLOW_STEPS, seed=1)
    longer = replace(short, steps=2 * SHORT_STEPS)
    alone_s = statistics.median(client.draw(short) for _ in range(5))
    longer_s = statistics.median(client.draw(longer) for _ in range(5))
    step_s = (longer_s - alone_s) / SHORT_STEPS
    late = list[float]()
    while len(late) < shorts:
        finish = client.start(slow)
        client.draw(short)
        late += [(client.draw(short) - alone_s) / step_s for _ in range(3)]
        finish()
    return late


if __name__ == "__main__":
    main()
