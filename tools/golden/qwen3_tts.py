"""Writes the golden values of Qwen3-TTS, computed by the package qwen-tts from tiny checkpoints.

The package needs older libraries than Stagemesh, and therefore a virtual environment of its own:

    python -m venv ENV
    ENV/bin/pip install torch==2.13.0 numpy scipy numba scikit-learn joblib decorator msgpack pooch lazy_loader
    ENV/bin/pip install audioread soundfile soxr einops psutil regex requests pyyaml tqdm 'huggingface_hub<1'
    ENV/bin/pip install --no-deps qwen-tts==0.1.1 transformers==4.57.3 accelerate==1.12.0 'tokenizers<0.23' librosa \
        safetensors
    stagemesh models tiny qwen3-tts CUSTOM
    stagemesh models tiny qwen3-tts-base BASE

Run the script in the repository's root:

    ENV/bin/python -m tools.golden.qwen3_tts CUSTOM BASE

It writes tests/models/golden/qwen3_tts.npz. All values are computed greedily in float32. The arrays of a request are:

- `NAME/ids`, `NAME/instruct_ids`, `NAME/reference_ids`: the tokens of its texts, with their roles
- `NAME/prompt`, `NAME/trailing`: the first elements of the talker's input embeddings of the prompt, and of the text
  that trails it
- `NAME/codes`: the codec frames, int16[frames, groups], without those of the reference
- `NAME/audio`: every `STRIDE`-th sample of the waveform

`request` describes the requests as JSON. The arrays of a reference voice are `SECONDS/x_vector`, `SECONDS/codes`, and
`SECONDS/mel`, which contains every `MEL_STRIDE`-th frame, float32[frames, mel size].
`codes` are random codec frames. `waveform_start` contains the first samples of their waveform, and `waveform` every
`STRIDE`-th sample.
"""

import argparse
import importlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

from tests.models.qwen3_tts.voice import SAMPLE_RATE_HZ, synthesize_voice

OUTPUT = Path("tests/models/golden/qwen3_tts.npz")
FRAMES = 24
DECODED_FRAMES = 310
WHOLE_SAMPLES = 10_000
STRIDE, MEL_STRIDE = 97, 12
ELEMENTS = 16
SHORT, LONG = 1.3, 3.9
CUSTOM_REQUESTS: dict[str, dict[str, Any]] = {
    "english": {"text": "Hello there, how are you?", "speaker": "ryan", "language": "english"},
    "auto": {"text": "Hello there, how are you?", "speaker": "Serena", "language": "Auto"},
    "german": {"text": "Guten Tag!", "speaker": "serena", "language": "german", "instruct": "Sad."},
    "dialect": {"text": "ni hao", "speaker": "eric", "language": "chinese"},
    "auto_dialect": {"text": "ni hao", "speaker": "dylan", "language": "auto"},
    "no_dialect": {"text": "ni hao", "speaker": "dylan", "language": "english"},
    "letter": {"text": "A", "speaker": "ryan", "language": "auto"},
    "design": {"text": "Good morning.", "language": "english", "instruct": "An old man."},
    "whole_text": {"text": "Hello there.", "speaker": "ryan", "language": "english", "non_streaming": True},
}
BASE_REQUESTS: dict[str, dict[str, Any]] = {
    "x_vector": {"text": "Hello there.", "language": "english", "reference": SHORT},
    "x_vector_auto": {"text": "Hello there.", "language": "auto", "reference": LONG},
    "long_text": {"text": "Hello there.", "language": "auto", "reference": SHORT, "reference_text": "Good day."},
    "long_voice": {"text": "Hello there.", "language": "german", "reference": LONG, "reference_text": "Good day."},
    "whole_clone": {
        "text": "Hello there.",
        "language": "english",
        "reference": SHORT,
        "reference_text": "Good day.",
        "non_streaming": True,
    },
}
Arrays = dict[str, np.ndarray[Any, Any]]


def main() -> None:
    """Loads both checkpoints, computes all values and writes them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("custom", type=Path, help="Folder of the tiny model qwen3-tts.")
    parser.add_argument("base", type=Path, help="Folder of the tiny model qwen3-tts-base.")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    _stub_absent_modules()
    custom, base = _load(arguments.custom), _load(arguments.base)
    arrays = {"request": np.array(json.dumps(CUSTOM_REQUESTS | BASE_REQUESTS))}
    arrays |= _decode_random(custom) | _analyse_voices(base)
    for model, requests in ((custom, CUSTOM_REQUESTS), (base, BASE_REQUESTS)):
        _generate_all(model, requests, arrays)
    OUTPUT.parent.mkdir(exist_ok=True)
    np.savez_compressed(OUTPUT, **arrays)  # type: ignore[arg-type]  # numpy's annotation names allow_pickle
    print(f"wrote {OUTPUT} ({OUTPUT.stat().st_size} bytes)")


def _stub_absent_modules() -> None:
    """Makes the modules importable that qwen-tts imports, but does not use for the codec of 12 Hz."""
    # transformers looks for the same modules when its models are imported.
    _ = importlib.import_module("transformers").AutoModel
    for name in ("gradio", "onnxruntime", "sox", "torchaudio", "torchaudio.compliance", "torchaudio.compliance.kaldi"):
        sys.modules[name] = ModuleType(name)


def _load(folder: Path) -> Any:
    """Returns a Qwen3TTSModel. Fails if the checkpoint lacks weights, or has further ones."""
    transformers: Any = importlib.import_module("transformers")
    package: Any = importlib.import_module("qwen_tts")
    models: Any = importlib.import_module("qwen_tts.core.models")
    codec: Any = importlib.import_module("qwen_tts.core").Qwen3TTSTokenizerV2Model
    load = transformers.PreTrainedModel.from_pretrained.__func__
    for kind, path in ((models.Qwen3TTSForConditionalGeneration, folder), (codec, folder / "speech_tokenizer")):
        _, info = load(kind, path, output_loading_info=True)
        problems = {kind: names for kind, names in info.items() if names}
        assert not problems, f"the weights in {path} do not fit: {problems}"
    model = models.Qwen3TTSForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    file = str(folder / "tokenizer.json")
    tokenizer = transformers.Qwen2TokenizerFast(tokenizer_file=file, pad_token="<|im_end|>")  # noqa: S106  # a token of text
    return package.Qwen3TTSModel(model, models.Qwen3TTSProcessor(tokenizer), model.generate_config)


def _decode_random(model: Any) -> Arrays:
    config = model.model.config.talker_config
    shape = (DECODED_FRAMES, config.num_code_groups)
    codes = np.random.default_rng(1).integers(0, config.code_predictor_config.vocab_size, shape)
    (samples,), _ = model.model.speech_tokenizer.decode({"audio_codes": torch.from_numpy(codes)})
    return {"codes": codes.astype(np.int16), "waveform_start": samples[:WHOLE_SAMPLES], "waveform": samples[::STRIDE]}


def _analyse_voices(model: Any) -> Arrays:
    source: Any = importlib.import_module("qwen_tts.core.models.modeling_qwen3_tts")
    arrays: Arrays = {}
    for seconds in (SHORT, LONG):
        voice = synthesize_voice(seconds)
        (item,) = model.create_voice_clone_prompt((voice, SAMPLE_RATE_HZ), "unused")
        mel = source.mel_spectrogram(
            torch.from_numpy(voice)[None],
            n_fft=1024,
            num_mels=128,
            sampling_rate=SAMPLE_RATE_HZ,
            hop_size=256,
            win_size=1024,
            fmin=0,
            fmax=12_000,
        )
        arrays[f"{seconds}/x_vector"] = item.ref_spk_embedding.numpy()
        arrays[f"{seconds}/codes"] = item.ref_code.numpy().astype(np.int16)
        arrays[f"{seconds}/mel"] = mel[0].T[::MEL_STRIDE].numpy()
    return arrays


def _generate_all(model: Any, requests: Mapping[str, dict[str, Any]], arrays: Arrays) -> None:
    """Adds the values of each request. Checks that requests at once give the codes of each request alone."""
    for name, request in requests.items():
        arrays |= {f"{name}/{part}": value for part, value in _generate(model, [request])[0].items()}
    together = [name for name, request in requests.items() if not request.get("non_streaming")]
    for name, values in zip(together, _generate(model, [requests[name] for name in together]), strict=True):
        np.testing.assert_array_equal(values["codes"], arrays[f"{name}/codes"], err_msg=name)


def _generate(model: Any, requests: list[dict[str, Any]]) -> list[Arrays]:
    """Generates the speech of requests that are either all by name, or all clones."""
    talker, seen = model.model.talker, dict[str, Any]()
    inputs = _inputs(model, requests)
    generate = talker.generate

    def record(**settings: Any) -> Any:
        seen.update(settings)
        return generate(**settings)

    talker.generate = record
    try:
        codes, _ = model.model.generate(
            **inputs,
            languages=[request["language"] for request in requests],
            speakers=[request.get("speaker") for request in requests],
            non_streaming_mode=bool(requests[0].get("non_streaming")),
            max_new_tokens=FRAMES + 1,
            do_sample=False,
            subtalker_dosample=False,
        )
    finally:
        del talker.generate
    result: list[Arrays] = []
    for number, frames in enumerate(codes):
        arrays: Arrays = {"codes": frames.numpy().astype(np.int16)}
        for name, ids in (
            ("ids", inputs["input_ids"]),
            ("instruct_ids", inputs["instruct_ids"]),
            ("reference_ids", inputs["ref_ids"]),
        ):
            if ids[number] is not None:
                arrays[name] = ids[number][0].numpy().astype(np.int16)
        if len(requests) == 1:
            arrays["prompt"] = seen["inputs_embeds"][0, :, :ELEMENTS].numpy()
            arrays["trailing"] = seen["trailing_text_hidden"][0, :, :ELEMENTS].numpy()
        arrays["audio"] = _decode(model, frames, inputs["voice_clone_prompt"], number)[::STRIDE]
        result.append(arrays)
    return result


def _inputs(model: Any, requests: list[dict[str, Any]]) -> dict[str, Any]:
    def tokenize(text: str | None, form: Any) -> Any:
        return model._tokenize_texts([form(text)])[0] if text else None  # noqa: SLF001

    inputs: dict[str, Any] = {
        "input_ids": [tokenize(request["text"], model._build_assistant_text) for request in requests],  # noqa: SLF001
        "instruct_ids": [tokenize(request.get("instruct"), model._build_instruct_text) for request in requests],  # noqa: SLF001
        "ref_ids": [tokenize(request.get("reference_text"), model._build_ref_text) for request in requests],  # noqa: SLF001
        "voice_clone_prompt": None,
    }
    if "reference" in requests[0]:
        items = [
            model.create_voice_clone_prompt(
                (synthesize_voice(request["reference"]), SAMPLE_RATE_HZ),
                request.get("reference_text"),
                x_vector_only_mode="reference_text" not in request,
            )[0]
            for request in requests
        ]
        inputs["voice_clone_prompt"] = model._prompt_items_to_voice_clone_prompt(items)  # noqa: SLF001
    return inputs


def _decode(model: Any, codes: Any, prompt: Mapping[str, Any] | None, number: int) -> np.ndarray[Any, Any]:
    """Returns the waveform of codec frames. The frames of the reference are decoded before them, and cut off."""
    reference = prompt["ref_code"][number] if prompt else None
    before = 0 if reference is None else len(reference)
    frames = codes if reference is None else torch.cat([reference, codes])
    (samples,), _ = model.model.speech_tokenizer.decode({"audio_codes": frames})
    return np.asarray(samples[int(before / len(frames) * len(samples)) :], np.float32)


if __name__ == "__main__":
    main()
