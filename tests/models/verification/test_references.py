from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from stagemesh.common.errors import NotReadyError
from stagemesh.common.plugins.descriptors import OptionSpec
from stagemesh.common.wire.tensors import Array
from stagemesh.services.engines.diffusion import signature_of
from stagemesh.services.engines.diffusion.options import stage_options
from stagemesh.verification.base import Outputs
from stagemesh.verification.diffusion import DiffusionReference
from stagemesh.verification.job import DeployedStage, ReferenceDescriptor, VerificationRequest, reference_descriptors
from stagemesh.verification.language_model import LanguageModel, tokenize
from stagemesh.verification.references import DIFFUSION, LANGUAGE_MODEL, QWEN3_OMNI
from tests.diffusion.tiny.calls import ImageSpec, classic_image, load
from tests.diffusion.tiny.pipelines import write_qwen_image
from tests.engines.vllm.media_files import encoded
from tests.engines.vllm.tiny_model import write_real_model
from tests.models.checkpoints import change_weights, changed
from tests.module_fixtures import made_for_module

TOKENS = 8
REQUEST = VerificationRequest("Hello", max_tokens=TOKENS)


def stage(name: str, model: Path, *, engine: str = "vllm", **facts: Any) -> DeployedStage:
    given: dict[str, Any] = {
        "function": "",
        "options": {"dtype": "float32"},
        "request_options": {},
        "accepts": frozenset(),
        "emits": frozenset({"token_ids", "prompt_ids"}),
    }
    return DeployedStage(name, engine, model=model, **{**given, **facts})


def roles(reference: ReferenceDescriptor, *stages: DeployedStage) -> list[Mapping[str, str]]:
    return [{each.role: each.stage.name for each in group} for group in reference.find(stages)]


def test_the_references_are_registered() -> None:
    assert reference_descriptors() == {
        "diffusion": DIFFUSION,
        "language_model": LANGUAGE_MODEL,
        "qwen3_omni": QWEN3_OMNI,
    }


def test_each_kind_of_model_has_one_reference(tiny_qwen3_omni: Path, tmp_path: Path) -> None:
    model = write_real_model(tmp_path / "model")
    thinker, text = stage("thinker", tiny_qwen3_omni), stage("text", model)
    talker = stage("talker", tiny_qwen3_omni, accepts=frozenset({"text_ids"}), emits=frozenset({"codes"}))
    vocoder = stage("vocoder", tiny_qwen3_omni, engine="function", function="qwen3_omni.code2wav")
    other = stage("other", model, engine="function", function="qwen3_omni.code2wav")
    stages = (thinker, talker, vocoder, other, text)
    assert roles(QWEN3_OMNI, *stages) == [{"thinker": "thinker", "talker": "talker", "code2wav": "vocoder"}]
    assert roles(LANGUAGE_MODEL, *stages) == [{"text": "text"}]
    assert roles(DIFFUSION, *stages) == []


def test_the_parts_of_a_diffusion_model_are_verified_together(tmp_path: Path) -> None:
    whole = stage("whole", tmp_path, engine="diffusion", options={}, emits=frozenset({"image"}))
    parts = [
        stage(part, tmp_path, engine="diffusion", options={"part": part}, emits=frozenset({emitted}))
        for part, emitted in {"encode": "conditioning", "denoise": "latents", "decode": "image"}.items()
    ]
    found = roles(DIFFUSION, whole, *parts)
    assert found == [{"all": "whole"}, {"encode": "encode", "denoise": "denoise", "decode": "decode"}]


model = made_for_module(write_real_model)


def reference_of(model: Path, *emits: str) -> LanguageModel:
    served = stage("text", model, emits=frozenset({"prompt_ids", "token_ids", *emits}))
    ((verified,),) = LANGUAGE_MODEL.find([served])
    return LanguageModel({"text": verified}, "cpu")


def answer(model: Path) -> dict[str, Array]:
    """The outputs of a stage, computed by transformers' own generation."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    prompt = tokenize(AutoTokenizer.from_pretrained(model), REQUEST.prompt)
    known: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    ids = torch.from_numpy(prompt[None]).long()
    made = known.generate(ids, max_new_tokens=TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0)
    return {"0/text.prompt_ids": prompt, "0/text.token_ids": made[0, len(prompt) :].numpy().astype(np.int32)}


def test_a_language_model_equals_itself_and_differs_by_one_token(model: Path) -> None:
    reference, outputs = reference_of(model), answer(model)
    assert [each.verdict for each in reference.compare(0, REQUEST, Outputs(0, outputs))] == ["equal", "equal"]
    outputs["0/text.token_ids"][5] ^= 1
    prompt, tokens = reference.compare(0, REQUEST, Outputs(0, outputs))
    assert (prompt.verdict, tokens.verdict) == ("equal", "differs")
    assert "token 5" in tokens.detail


def test_an_output_that_the_pipeline_lacks_is_skipped_with_the_remedy(model: Path) -> None:
    outputs = {"0/text.token_ids": answer(model)["0/text.token_ids"]}
    reference = reference_of(model, "hidden_states_1")
    prompt, tokens, states = reference.compare(0, REQUEST, Outputs(0, outputs))
    assert [prompt.verdict, tokens.verdict, states.verdict] == ["skipped", "equal", "skipped"]
    assert "add `hidden_states_1: text.hidden_states_1`" in states.detail


def test_a_checkpoint_without_a_weight_is_refused(model: Path, tmp_path: Path) -> None:
    lacking = changed(model, tmp_path, change_weights(lambda weights: weights.pop("model.norm.weight")))
    with pytest.raises(NotReadyError, match=r"missing: model\.norm\.weight"):
        reference_of(lacking)


def test_an_image_equals_that_of_the_call_and_differs_by_one_pixel(tmp_path: Path) -> None:
    folder, spec = write_qwen_image(tmp_path), ImageSpec("Hello", "", steps=2)
    options: dict[str, Any] = {"dtype": "float32", "height": 64, "width": 64, "num_inference_steps": 2}
    options["guidance_scale"] = spec.scale
    signature = signature_of(stage_options(options))
    defaults = {name: option.default for name, option in signature.options.items() if isinstance(option, OptionSpec)}
    facts = {"options": options, "request_options": defaults, "emits": frozenset(signature.emits)}
    served = stage("image", folder, engine="diffusion", **facts)
    ((verified,),) = DIFFUSION.find([served])
    reference = DiffusionReference({verified.role: verified}, "cpu")
    pixels = classic_image("qwen-image", load(folder), spec)[0].permute(1, 2, 0).mul(255).round().byte().numpy()
    assert verdict(reference, pixels) == "equal"
    pixels[10, 20, 1] ^= 8
    assert verdict(reference, pixels) == "differs"


def verdict(reference: DiffusionReference, pixels: "np.ndarray[Any, np.dtype[np.uint8]]") -> str:
    outputs = Outputs(0, {"0/image.image": np.frombuffer(encoded(pixels), np.uint8)})
    (compared,) = reference.compare(0, REQUEST, outputs)
    return compared.verdict
