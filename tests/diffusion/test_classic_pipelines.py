"""Pipelines without a modular form generate the same output as their own `__call__`, while requests alternate."""

import asyncio
import io
import json
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, wraps
from pathlib import Path
from typing import Any

import diffusers as _diffusers
import numpy as np
import pytest
import torch
from PIL import Image
from transformers import Qwen2Config, Qwen2ForCausalLM

from stagemesh.common.errors import InternalError, InvalidRequestError, NotReadyError
from stagemesh.common.wire.tensors import Value
from stagemesh.services.engines.base import Emission, Progress, Task
from stagemesh.services.engines.diffusion import AUDIO, FRAMES, TEXT
from stagemesh.services.engines.diffusion.options import DiffusionOptions
from stagemesh.services.engines.diffusion.state import DiffusionInputs
from stagemesh.services.engines.diffusion.worker import Decoded, DiffusionRunner
from stagemesh.services.engines.prompts import ChatMessage, Conversation, MediaFile
from stagemesh.tiny_models.diffusion.pipelines import tiny_pipeline
from stagemesh.tiny_models.diffusion.tokenizers import qwen_tokenizer
from tests.diffusion.stages import diffusion_config, started
from tests.engines.support import collect

diffusers: Any = _diffusers
# diffusers itself uses deprecated functions and configurations.
pytestmark = [pytest.mark.timeout(120), pytest.mark.filterwarnings("ignore::FutureWarning")]


@dataclass(frozen=True)
class Call:
    """The inputs and options of a class, and the number of steps that a request for three steps has."""

    images: int = 0
    steps: int = 3
    frames: int = 1
    arguments: Mapping[str, Value] = field(default_factory=dict[str, Value])
    options: Mapping[str, int] = field(default_factory=dict[str, int])
    like: str = ""
    """The class whose tiny folder it can read, if not its own."""


CALLS = {
    "StableDiffusionPipeline": Call(),
    "StableDiffusionImg2ImgPipeline": Call(
        images=1, steps=2, arguments={"strength": 0.7}, like="StableDiffusionPipeline"
    ),
    "StableDiffusion3InpaintPipeline": Call(images=2, arguments={"strength": 1.0}, like="StableDiffusion3Pipeline"),
    "WanVideoToVideoPipeline": Call(images=5, arguments={"strength": 1.0}),
    "HunyuanVideoPipeline": Call(frames=5),
    # Its progress bar reports the steps, because it has no callback.
    "DiTPipeline": Call(arguments={"class_labels": 3}),
    # Runs in one step, because it changes the attention processors of the model.
    "StableDiffusionPAGPipeline": Call(steps=1, like="StableDiffusionPipeline"),
    "StableAudioPipeline": Call(arguments={"audio_end_in_s": 0.2}, options={"audio_rate_hz": 44_100}),
    "LLaDA2Pipeline": Call(steps=12, arguments={"gen_length": 24}, options={"text": True}),
}


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Returns the tiny folder of a class in `CALLS`."""

    @cache
    def write(name: str) -> Path:
        return _write(name, tmp_path_factory.mktemp(name))

    return write


@pytest.fixture(autouse=True)
def _leaves_no_thread() -> Iterator[None]:
    yield
    assert not [thread for thread in threading.enumerate() if thread.name == "suspended call"]


def _write(name: str, folder: Path) -> Path:
    if name == "LLaDA2Pipeline":
        _text_pipeline().save_pretrained(folder)
        # diffusers saves no tokenizer, because it is optional.
        _text_pipeline().tokenizer.save_pretrained(folder / "tokenizer")
        return _rename(folder, name, tokenizer=["transformers", "Qwen2Tokenizer"])
    pipeline = tiny_pipeline(CALLS[name].like or name)
    assert pipeline is not None
    pipeline.write(folder)
    if (unet := folder / "unet" / "config.json").exists():
        # Some classes compare it with a number.
        unet.write_text(json.dumps({**json.loads(unet.read_text(encoding="utf-8")), "sample_size": 64}))
    return _rename(folder, name)


def _rename(folder: Path, name: object, **components: object) -> Path:
    index = json.loads((folder / "model_index.json").read_text(encoding="utf-8"))
    (folder / "model_index.json").write_text(json.dumps({**index, "_class_name": name, **components}), encoding="utf-8")
    return folder


@cache
def _text_pipeline() -> Any:
    tokenizer = qwen_tokenizer()
    tokenizer.add_special_tokens({"mask_token": "<|mask|>", "eos_token": "<|endoftext|>"})
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        initializer_range=0.3,
    )
    model_class: Any = Qwen2ForCausalLM
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = model_class(config)
    scheduler = diffusers.BlockRefinementScheduler(block_length=8)
    return diffusers.LLaDA2Pipeline(model=model.eval(), scheduler=scheduler, tokenizer=tokenizer)


def _runner(folder: Path, **options: Any) -> DiffusionRunner:
    return DiffusionRunner(folder, DiffusionOptions(dtype="float32", device="cpu", **options), torch.device("cpu"))


def _inputs(name: str, seed: int, **changed: Any) -> DiffusionInputs:
    call = CALLS[name]
    values: dict[str, Any] = {
        "prompt": f"two dogs and {seed} tails",
        "images": tuple(_png(seed + i) for i in range(call.images)),
        "height": 64,
        "width": 64,
        "num_frames": call.frames,
        "num_inference_steps": 3,
        "guidance_scale": 3.0,
        "arguments": call.arguments,
    }
    return DiffusionInputs(seed=seed, **values | changed)


def _png(seed: int) -> bytes:
    file = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 256, (64, 64, 3), np.uint8)
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def _expected(runner: DiffusionRunner, inputs: DiffusionInputs, folder: Path) -> Any:
    """Returns the first field of the result of the pipeline's own `__call__`."""
    text = _text_pipeline() if "LLaDA2" in folder.name else None
    pipeline = text or diffusers.DiffusionPipeline.from_pretrained(folder, local_files_only=True)
    pipeline.set_progress_bar_config(disable=True)
    torch.manual_seed(inputs.seed)
    output = pipeline(**runner.pipeline._arguments(inputs))
    return output.get("texts") or next(iter(output.values()))


def _check(decoded: Decoded, expected: Any, text: str) -> None:
    if decoded.text is not None:
        assert text + decoded.text == expected[0]
    elif decoded.audio is not None:
        assert torch.equal(torch.from_numpy(decoded.audio.T), torch.as_tensor(expected)[0])
    else:
        assert decoded.frames is not None
        last = torch.from_numpy(expected).movedim(-1, -3) if isinstance(expected, np.ndarray) else expected
        assert torch.equal(torch.from_numpy(decoded.frames), last.reshape(decoded.frames.shape))
        assert decoded.frames.std() > 0.01


@pytest.mark.parametrize("name", CALLS)
def test_alternating_requests_equal_the_own_call(name: str, folder_of: Callable[[str], Path]) -> None:
    runner = _runner(folder_of(name), **CALLS[name].options)
    requests = {f"{seed}": _inputs(name, seed) for seed in range(2)}
    totals = {runner.begin(each, inputs).total_steps for each, inputs in requests.items()}
    runner.begin("interrupted", _inputs(name, 2))
    texts = dict.fromkeys(requests, "")
    assert totals == {CALLS[name].steps}
    for step in range(CALLS[name].steps):
        assert runner.step(list(requests)) == [None, None]
        if step == 0:
            runner.step(["interrupted"])
            runner.drop("interrupted")
        if name == "LLaDA2Pipeline" and step + 1 < CALLS[name].steps:
            texts = {each: texts[each] + (runner.decode(each).text or "") for each in requests}
    for each, inputs in requests.items():
        _check(runner.decode(each), _expected(runner, inputs, folder_of(name)), texts[each])
        runner.drop(each)
    assert all(texts.values()) == (name == "LLaDA2Pipeline"), "the final part of a text leaves before the last step"


def test_noise_of_torchs_own_generator_depends_on_the_seed_alone(
    folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    own_step = diffusers.DDIMScheduler.step

    @wraps(own_step)
    def step(*args: Any, **kwargs: Any) -> Any:
        return (own_step(*args, **kwargs)[0] + torch.rand(()),)

    monkeypatch.setattr(diffusers.DDIMScheduler, "step", step)
    test_alternating_requests_equal_the_own_call("StableDiffusionPipeline", folder_of)


def test_an_error_within_the_call_ends_only_its_request(
    folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "StableDiffusionPipeline"
    runner = _runner(folder_of(name))
    for each in ("fails", "runs"):
        runner.begin(each, _inputs(name, 1))
    with monkeypatch.context() as patched:
        patched.setattr(runner.pipeline.components.unet, "forward", None)
        (error,) = runner.step(["fails"])
    assert isinstance(error, InternalError)
    for _ in range(3):
        assert runner.step(["runs"]) == [None]
    _check(runner.decode("runs"), _expected(runner, _inputs(name, 1), folder_of(name)), "")


@pytest.mark.parametrize(
    ("changed", "problem"),
    [({"height": 65}, "divisible by 8"), ({"requested": frozenset({"num_frames"})}, "has no option num_frames")],
)
def test_a_request_that_does_not_fit_the_class_is_invalid(
    changed: Mapping[str, Any], problem: str, folder_of: Callable[[str], Path]
) -> None:
    name = "StableDiffusionPipeline"
    with pytest.raises(InvalidRequestError, match=problem):
        _runner(folder_of(name)).begin("r", _inputs(name, 1, **changed))
    with pytest.raises(InvalidRequestError, match="needs the inputs class_labels"):
        _runner(folder_of("DiTPipeline")).begin("r", _inputs("DiTPipeline", 1, arguments={}))


@pytest.mark.parametrize(
    ("index", "options", "problem"),
    [
        ({"name": "NoSuchPipeline"}, {}, "NoSuchPipeline"),
        ({"name": ["pipeline", "MyPipeline"]}, {}, "code of the folder"),
        ({"unet": ["my_unet", "MyUnet"]}, {}, r"unet \(MyUnet\).*not part of diffusers"),
        ({"unet": ["os", "path"]}, {}, r"unet \(path\).*not part of diffusers"),
        ({}, {"arguments": {"strenght": 0.5}}, "no parameter strenght"),
        ({}, {"part": "encode"}, "part encode"),
        ({}, {"text": True}, "generates images or audio; set the option text to false"),
        ({}, {"checkpoint_steps": 1}, "checkpoint_steps"),
    ],
)
def test_a_folder_or_option_that_cannot_run_is_refused(
    index: Mapping[str, Any], options: Mapping[str, Any], problem: str, folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    shutil.copytree(folder_of("StableDiffusionPipeline"), tmp_path / "copy")
    components = {key: value for key, value in index.items() if key != "name"}
    folder = _rename(tmp_path / "copy", index.get("name", "StableDiffusionPipeline"), **components)
    with pytest.raises(NotReadyError, match=problem):
        _runner(folder, **options)


@pytest.mark.parametrize(
    ("name", "output"),
    [("StableDiffusionImg2ImgPipeline", FRAMES), ("StableAudioPipeline", AUDIO), ("LLaDA2Pipeline", TEXT)],
)
@pytest.mark.asyncio
async def test_an_engine_runs_the_pipeline_to_its_outputs(
    name: str, output: str, folder_of: Callable[[str], Path]
) -> None:
    images = (MediaFile("image", _png(i), "image/png") for i in range(CALLS[name].images))
    prompt = Conversation([ChatMessage("user", "", ("two dogs", *images))])
    config = diffusion_config(name, folder_of(name), arguments=dict(CALLS[name].arguments), **CALLS[name].options)
    async with started(config) as engine:
        assert not engine.abilities.can_pause
        requests = [Task(f"{i}", i, prompt=prompt, options={"num_inference_steps": 3}) for i in range(2)]
        results = await asyncio.gather(*(collect(engine.submit(each)) for each in requests))
    for events in results:
        emissions = [event for event in events if isinstance(event, Emission)]
        steps = [event.steps for event in events if isinstance(event, Progress)]
        assert steps == list(range(1, CALLS[name].steps + 1))
        assert len(emissions) == 1 or output == TEXT
        assert all(output in each.packet.tensors for each in emissions)
        assert output != TEXT or events.index(emissions[0]) < events.index(Progress(steps[-1], steps[-1]))
