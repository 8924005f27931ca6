"""A folder's pipeline comes from diffusers' own mapping, and a folder that its blocks do not fit is refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest
from diffusers import LTX2AutoBlocks, LTX2ModularPipeline

from stagemesh.common.errors import NotReadyError
from stagemesh.services.engines.diffusion.model.definition import Definition, define, is_classic

_TEXT = {"text_encoder": ["transformers", "UMT5EncoderModel"], "tokenizer": ["transformers", "T5TokenizerFast"]}
WAN = {
    **_TEXT,
    "_class_name": "WanPipeline",
    "scheduler": ["diffusers", "UniPCMultistepScheduler"],
    "transformer": ["diffusers", "WanTransformer3DModel"],
    "transformer_2": [None, None],
    "vae": ["diffusers", "AutoencoderKLWan"],
    "boundary_ratio": None,
    "expand_timesteps": False,
}
WAN_22 = {**WAN, "boundary_ratio": 0.875, "transformer_2": WAN["transformer"]}


def write(folder: Path, index: dict[str, Any], name: str = "model_index.json") -> Path:
    (folder / name).write_text(json.dumps(index), encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    ("index", "kind"),
    [
        (WAN, "WanModularPipeline"),
        (WAN_22, "Wan22ModularPipeline"),
        ({**WAN, "safety_checker": ["diffusers", "Anything"]}, "WanModularPipeline"),
        ({**WAN, "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"]}, "WanModularPipeline"),
    ],
)
def test_the_index_selects_the_pipeline(index: dict[str, Any], kind: str, tmp_path: Path) -> None:
    assert define(write(tmp_path, index)).kind.__name__ == kind


@pytest.mark.parametrize(("setting", "is_whole"), [("expand_timesteps", True), ("new_setting", False)])
def test_a_setting_that_only_the_classic_class_has_selects_its_call(
    setting: str, is_whole: bool, tmp_path: Path
) -> None:
    assert is_classic(write(tmp_path, {**WAN, setting: True})) == is_whole


def without(name: str, index: dict[str, Any] = WAN) -> dict[str, Any]:
    return {each: value for each, value in index.items() if each != name}


@pytest.mark.parametrize(
    ("index", "named"),
    [
        ({**WAN, "expand_timesteps": True}, "do not use the setting expand_timesteps"),
        ({**WAN, "new_setting": 3}, "do not use the setting new_setting"),
        ({**WAN, "controlnet": ["diffusers", "FluxControlNetModel"]}, "do not use the component controlnet"),
        ({**WAN, "transformer_2": WAN["transformer"]}, "do not use the component transformer_2"),
        ({**WAN, "image_encoder": ["transformers", "CLIPVisionModel"]}, "do not use the component image_encoder"),
        *((without(name), f"has no component {name}") for name in ("vae", "text_encoder", "tokenizer", "scheduler")),
        (without("transformer_2", WAN_22), "has no component transformer_2"),
        ({**WAN, "scheduler": ["diffusers", "DDIMScheduler"]}, "cannot use DDIMScheduler as scheduler"),
        (
            {**WAN, "scheduler": ["diffusers", "NextScheduler"]},
            "no class NextScheduler, which is the component scheduler",
        ),
        ({**WAN, "transformer": ["diffusers", "Wan9Transformer"]}, "no class Wan9Transformer"),
        ({**WAN, "transformer": ["diffusers", "FluxTransformer2DModel"]}, "cannot use FluxTransformer2DModel"),
        ({**WAN, "text_encoder": ["transformers", "NextEncoder"]}, "no class NextEncoder"),
        ({**WAN, "transformer": ["my_module", "Mine"]}, "transformer .* needs the module my_module"),
        ({**WAN, "_class_name": "NextPipeline"}, "cannot run NextPipeline .*has no such class"),
        ({**WAN, "_class_name": ["pipeline", "Mine"]}, "is code of the folder"),
        ({**WAN, "_class_name": "DanceDiffusionPipeline"}, "no modular pipeline"),
        ({**WAN, "_class_name": "WanVideoToVideoPipeline"}, "do not take the input video"),
        ({"a": 1}, "names no pipeline class"),
    ],
)
def test_a_folder_that_does_not_fit_is_refused_by_name(index: dict[str, Any], named: str, tmp_path: Path) -> None:
    with pytest.raises(NotReadyError, match=named):
        define(write(tmp_path, index))


def test_a_modular_index_selects_its_blocks(tmp_path: Path) -> None:
    spec = {"pretrained_model_name_or_path": "elsewhere", "subfolder": "x", "variant": None, "revision": None}
    components: dict[str, Any] = {
        name: [*value, {**spec, "type_hint": value}]
        for name, value in WAN_22.items()
        if isinstance(value, list) and value[0] is not None
    }
    index: dict[str, Any] = {"_class_name": "Wan22ModularPipeline", "_blocks_class_name": "Wan22Blocks", **components}
    definition = define(write(tmp_path, index, "modular_model_index.json"))
    assert set(definition.phases) == {"text_encoder", "denoise", "decode"}
    assert definition.name == "wan"
    # Its blocks declare the classes of Wan and of VACE for the same components.
    vace: dict[str, Any] = {"_class_name": "Wan22VaceModularPipeline", "_blocks_class_name": "Wan22VaceBlocks"}
    vace |= {name: ["diffusers", "WanVACETransformer3DModel", spec] for name in ("transformer", "transformer_2")}
    assert define(write(tmp_path, {**index, **vace}, "modular_model_index.json")).name == "wan-vace"
    with pytest.raises(NotReadyError, match="blocks are code of the folder"):
        own_blocks = {**index, "_class_name": "ModularPipeline", "_blocks_class_name": "MyBlocks"}
        define(write(tmp_path, own_blocks, "modular_model_index.json"))


def test_a_stage_may_run_some_blocks_of_a_part() -> None:
    blocks: Any = LTX2AutoBlocks()
    definition = Definition("ltx2", LTX2ModularPipeline, blocks, {})
    chosen = definition.part("decode", ["audio_decode"])["decode"]
    specs = [spec for block in chosen.values() for spec in block.expected_components]
    assert {spec.name for spec in specs} == {"audio_vae", "vocoder"}
    with pytest.raises(NotReadyError, match="the part decode of ltx2 has no block sound; it has decode"):
        definition.part("decode", ["sound"])


@pytest.mark.parametrize(
    ("changed", "expected"), [({}, False), ({"expand_timesteps": True}, True), ({"new": 1}, False)]
)
def test_a_setting_of_only_the_classic_class_selects_it(
    changed: dict[str, Any], expected: bool, tmp_path: Path
) -> None:
    assert is_classic(write(tmp_path, {**WAN, **changed})) is expected
