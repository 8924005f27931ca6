"""Compares the diffusion stage with the pipeline's own `__call__`: step by step, and through the gRPC service.

The model is Qwen-Image's real classes with two layers. Compared runs alternate, and a ratio is the median over
pairs. Steps and `__call__` run in this process and are also compared by the processor time of its only thread. The
stage is a process of its own, whose processor time is compared with that of `__call__`, too: it varies less than the
time of a machine that others use. All of them compute on the GPU if the machine has one.
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

import numpy as np
import torch

from benchmarks.ar_variants.processes import cpu_s
from benchmarks.diffusion_ways.calls import StageClient, begun, step
from benchmarks.report import Figure, report
from benchmarks.stage_process import StageProcess
from stagemesh.common.process.stage_process import StageConfig
from stagemesh.services.engines.diffusion.caches import PromptCache
from stagemesh.services.engines.diffusion.model.modular_pipeline import ModularStepPipeline
from stagemesh.services.engines.diffusion.options import DiffusionOptions
from stagemesh.services.engines.torch_setup import choose_device
from tests.diffusion.tiny.calls import ImageSpec, classic_image, load
from tests.diffusion.tiny.pipelines import write_qwen_image

MODEL = "qwen-image"
SIDE = 256
STEPS = 20
TOKENS = {64: 128, 256: 256}
"""Side length of an image in pixels, by its number of latent tokens."""
TOGETHER = 4
SLOW_STEPS, SHORT_STEPS = 50, 4


def main() -> None:
    """Measures, prints the figures, and writes them as JSON if `--json` is given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument(
        "--pairs", type=int, default=24, help="number of measured pairs per ratio; default: %(default)s"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = write_qwen_image(folder / "model")
        classic = load(model).to(choose_device("auto"))
        figures = _in_process(classic, model, pairs=arguments.pairs)
        staged = stack.enter_context(StageProcess(folder, _config(model)))
        client = StageClient(staged.endpoint)
        stack.callback(client.close)
        figures += _through_the_stage(classic, client, process_id=staged.process_id, pairs=arguments.pairs)
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
        # Prompts are repeated here, and must cost the same as in `__call__`.
        options={"dtype": "float32", "max_running": 2 * TOGETHER, "prompt_cache_bytes": 0},
    )


def _processor_times(classic: Any, client: StageClient, *, process_id: int, pairs: int) -> tuple[float, float]:
    """Returns the median processor time in seconds that the stage's process and `__call__` use for an image."""
    spec, drawn_s, called_s = _square(SIDE, STEPS), list[float](), list[float]()
    for _ in range(pairs):
        began_s = cpu_s(process_id)
        client.draw(spec)
        drawn_s.append(cpu_s(process_id) - began_s)
        began_s = time.thread_time()
        _called(classic, spec)
        called_s.append(time.thread_time() - began_s)
    return statistics.median(drawn_s), statistics.median(called_s)


def _square(side: int, steps: int, *, seed: int = 0, prompt: str = "a red cube on a table") -> ImageSpec:
    return ImageSpec(prompt, seed=seed, height=side, width=side, steps=steps)


def _called(classic: Any, spec: ImageSpec) -> torch.Tensor:
    """Returns the image of `__call__`. It is copied to the host, which waits for a GPU."""
    return classic_image(MODEL, classic, spec).cpu()


def _in_process(classic: Any, model: Path, *, pairs: int) -> list[Figure]:
    pipeline = ModularStepPipeline(model, DiffusionOptions(dtype="float32"))
    spec = _square(SIDE, STEPS)
    ours, theirs = (lambda: step(pipeline, spec).cpu()), (lambda: _called(classic, spec))
    largest = float(np.abs(step(pipeline, spec).cpu().numpy() - _called(classic, spec).numpy()).max())
    # A GPU may choose other kernels for other batches, which sum in another order.
    assert not largest or torch.cuda.is_available(), "both ways generate the same image"
    wall = _ratio(ours, theirs, clock=time.perf_counter, pairs=pairs)
    processor = _ratio(ours, theirs, clock=time.thread_time, pairs=pairs)
    cached = ModularStepPipeline(model, DiffusionOptions(dtype="float32"), prompt_cache=PromptCache(1 << 24))
    hit = _ratio(lambda: begun(cached, spec), lambda: begun(pipeline, spec), clock=time.perf_counter, pairs=pairs)
    where = f"{SIDE}x{SIDE}, {STEPS} steps, one process"
    return [
        Figure("step by step / __call__", wall, "ratio", "<=1.001", where),
        Figure("step by step / __call__, processor time", processor, "ratio", "", where),
        Figure("everything before the steps, prompt known / not", hit, "ratio", "<=0.9", where),
        Figure("largest difference of the images", largest, "", "", where),
    ]


def _through_the_stage(classic: Any, client: StageClient, *, process_id: int, pairs: int) -> list[Figure]:
    spec = _square(SIDE, STEPS)
    client.draw(spec)
    served = _ratio(lambda: client.draw(spec), lambda: _called(classic, spec), clock=time.perf_counter, pairs=pairs)
    where = "through the gRPC stage"
    drawn_s, called_s = _processor_times(classic, client, process_id=process_id, pairs=pairs // 2)
    figures = [
        Figure(f"{SIDE}x{SIDE}, {STEPS} steps, stage / __call__", served, "ratio", "<=1.02", where),
        Figure("the same, processor time of the stage's process / of __call__", drawn_s / called_s, "ratio", "", where),
        Figure(
            "processor time of the stage over __call__, a step", 1e6 * (drawn_s - called_s) / STEPS, "µs", "", where
        ),
    ]
    for tokens, goal in ((64, ">=1.4"), (256, ">=1.2")):
        gain = _gain(client, side=TOKENS[tokens], pairs=pairs // 3)
        what = f"{TOGETHER} at once / one after the other, {tokens} latent tokens, images a second"
        figures.append(Figure(what, gain, "ratio", goal, where))
    late = _lateness(client, shorts=pairs // 2)
    what = f"a {SHORT_STEPS}-step request concurrent with one of {SLOW_STEPS}: median delay, in its own steps"
    figures.append(Figure(what, statistics.median(late), "steps", "<=2", where))
    figures.append(Figure("the same, maximum", max(late), "steps", "", where))
    return figures


def _ratio(
    ours: Callable[[], object], theirs: Callable[[], object], *, clock: Callable[[], float], pairs: int
) -> float:
    """Returns the median ratio over pairs. The order within a pair alternates."""

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
    """Returns the factor by which concurrent requests increase the images per second."""
    specs = [_square(side, STEPS, seed=seed, prompt="a red cube " * (1 + seed)) for seed in range(TOGETHER)]
    # Lets the stage measure which batch sizes pay.
    for _ in range(4):
        client.draw_all(specs)
    return statistics.median(_alone(client, specs) / client.draw_all(specs) for _ in range(max(3, pairs)))


def _alone(client: StageClient, specs: Sequence[ImageSpec]) -> float:
    return sum(client.draw(spec) for spec in specs)


def _lateness(client: StageClient, *, shorts: int) -> list[float]:
    """Returns the delay of each short request compared to short requests alone just before, in its own steps."""
    short, slow = _square(SIDE, SHORT_STEPS), _square(SIDE, SLOW_STEPS, seed=1)
    longer = replace(short, steps=2 * SHORT_STEPS)
    delays_s, steps_s = list[float](), list[float]()
    while len(delays_s) < shorts:
        alone_s = statistics.median(client.draw(short) for _ in range(3))
        steps_s.append((statistics.median(client.draw(longer) for _ in range(3)) - alone_s) / SHORT_STEPS)
        finish = client.start(slow)
        client.draw(short)
        delays_s += [client.draw(short) - alone_s for _ in range(3)]
        finish()
    step_s = statistics.median(steps_s)
    return [delay_s / step_s for delay_s in delays_s]


if __name__ == "__main__":
    main()
