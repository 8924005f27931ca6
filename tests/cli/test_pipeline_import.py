"""`stagemesh pipeline import`. The configs in the folder vllm_omni use the keys that vLLM-Omni documents."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from stagemesh.common.errors import ExitCode
from stagemesh.services.engines.diffusion.model.families import FAMILIES
from stagemesh.vllm_omni.keys import VLLM_ARGUMENTS
from stagemesh.vllm_omni.known_models import DIFFUSION_CHECKPOINTS
from tests.cli.commands import invoke

CONFIGS = Path(__file__).parent / "vllm_omni"
STREAMED = {"frames": 25, "initial_frames": 4, "ramp": "auto"}


class Imported(NamedTuple):
    """The result of an import: the pipeline, and the paths of the reported keys by outcome."""

    pipeline: Any
    missing: list[str]
    not_carried: set[str]
    not_needed: set[str]

    @property
    def stages(self) -> Any:
        """The stages of the pipeline by name."""
        return self.pipeline["stages"]


def _import(name: str, *arguments: str) -> Imported:
    """Imports a config, and checks that the file, if there is one, is valid and has the content that JSON shows."""
    ran = invoke("pipeline", "import", str(CONFIGS / f"{name}.yaml"), "--json", *arguments)
    document = json.loads(ran.stdout)
    lists = [[item["path"] for item in document[key]] for key in ("missing", "not_carried", "not_needed")]
    assert ran.exit_code == (ExitCode.FAILED if lists[0] else 0)
    assert (document["pipeline"] is None) is bool(lists[0])
    assert yaml.safe_load(document["file"] or "null") == document["pipeline"]
    return Imported(document["pipeline"], lists[0], set(lists[1]), set(lists[2]))


def _refuse(folder: Path, text: str) -> str:
    (folder / "config.yaml").write_text(text)
    ran = invoke("pipeline", "import", str(folder / "config.yaml"))
    assert (ran.exit_code, ran.stdout, "Traceback" in ran.stderr) == (ExitCode.USAGE, "", False)
    return ran.stderr


def _edge(producer: str, consumer: str, **more: object) -> dict[str, object]:
    return {"from": producer, "to": consumer, **more}


@pytest.mark.parametrize(
    "name",
    [
        "overlay",
        "qwen2_5_omni",
        "qwen2_5_omni_connectors",
        "qwen2_5_thinker",
        "qwen3_omni_async_chunk",
        "qwen3_omni_moe",
        "qwen3_omni_sparse",
        "qwen3_omni_whole",
        "qwen3_tts",
        "qwen3_tts_stage_args",
        "qwen_image",
        "qwen_image_cached",
        "qwen_image_three_stages",
        "wan_video",
    ],
)
def test_a_written_pipeline_is_valid(name: str, tmp_path: Path) -> None:
    written = tmp_path / "pipeline.yaml"
    assert invoke("pipeline", "import", str(CONFIGS / f"{name}.yaml"), "--output", str(written)).exit_code == 0
    assert invoke("pipeline", "validate", str(written), "--no-models", "--no-import").exit_code == 0


def test_qwen2_5_omni_becomes_three_stages() -> None:
    found = _import("qwen2_5_omni")
    assert (found.pipeline["pipeline"], found.pipeline["main_stage"]) == ("qwen2-5-omni", "thinker")
    assert [(name, stage["engine"]) for name, stage in found.stages.items()] == [
        ("thinker", "vllm"),
        ("talker", "vllm"),
        ("token2wav", "function"),
    ]
    assert {stage["model"] for stage in found.stages.values()} == {"${STAGEMESH_MODEL:-Qwen2.5-Omni-7B}"}
    assert found.pipeline["edges"] == [
        _edge("thinker", "talker", transform="qwen2_5_omni.thinker2talker"),
        _edge(
            "talker",
            "token2wav",
            transform="qwen2_5_omni.talker2token2wav",
            chunk={"frames": 48, "initial_frames": 24, "ramp": "auto"},
        ),
    ]
    assert found.pipeline["outputs"] == {"text": "thinker.text", "audio": "token2wav.audio"}


def test_engine_arguments_and_sampling_defaults_are_options() -> None:
    stages = _import("qwen2_5_omni").stages
    assert stages["thinker"]["options"] == {
        "gpu_memory_utilization": 0.8,
        "enforce_eager": True,
        "trust_remote_code": True,
        "enable_prefix_caching": False,
        "max_num_seqs": 1,
        "override_generation_config": {"max_new_tokens": 512, "temperature": 0.0, "top_k": -1, "top_p": 1.0},
        "device_ids": [0],
        "mm_processor_kwargs": {"fps": 2.0},
        "hidden_states": {"layers": ["last"], "positions": True},
    }
    assert stages["talker"]["options"]["codec"] == {"model": "qwen2_5_omni.talker"}
    assert stages["token2wav"]["options"] == {"max_batch": 4}


def test_every_other_key_is_reported_by_its_path() -> None:
    found = _import("qwen2_5_omni")
    assert found.not_carried == {
        "runtime.defaults.max_inflight",
        "stage_args[0].default_sampling_params.seed",
        "stage_args[2].runtime.devices",
    }
    assert found.not_needed == {
        "runtime.defaults.window_size",
        "runtime.edges[0].window_size",
        "runtime.edges[1].window_size",
        "runtime.enabled",
        "stage_args[0].default_sampling_params.detokenize",
        "stage_args[0].engine_args.engine_output_type",
        "stage_args[0].engine_args.scheduler_cls",
        "stage_args[0].engine_args.worker_cls",
        "stage_args[0].is_comprehension",
        "stage_args[0].runtime.process",
        "stage_args[1].default_sampling_params.stop_token_ids",
        "stage_args[1].engine_args.worker_cls",
        "stage_args[1].runtime.process",
        "stage_args[2].default_sampling_params.temperature",
        "stage_args[2].engine_args.gpu_memory_utilization",
        "stage_args[2].engine_args.max_num_batched_tokens",
        "stage_args[2].engine_args.scheduler_cls",
        "stage_args[2].engine_args.worker_cls",
        "stage_args[2].runtime.process",
    }


def test_connectors_are_chosen_by_edge() -> None:
    found = _import("qwen2_5_omni_connectors")
    assert [edge.get("connector") for edge in found.pipeline["edges"]] == [None, "shm"]
    assert found.not_carried == set()
    assert found.not_needed == {
        "runtime.connectors.memory.extra.shm_threshold_bytes",
        "runtime.connectors.mooncake.extra.host",
        "runtime.connectors.mooncake.extra.metadata_server",
        "runtime.connectors.mooncake.extra.proto",
        "runtime.connectors.mooncake.extra.segment",
        "runtime.connectors.mooncake.name",
        "runtime.connectors.spare",
    }


def test_a_thinker_alone_sends_no_states() -> None:
    found = _import("qwen2_5_thinker")
    assert found.stages["thinker"]["options"] == {
        "max_model_len": 4096,
        "mm_processor_cache_gb": 0,
        "limit_mm_per_prompt": {"image": 2},
        "device_ids": [0],
        "mm_processor_kwargs": {"fps": 2.0},
    }
    assert found.pipeline["outputs"] == {"text": "thinker.text"}


def test_functions_of_async_chunks_are_transforms() -> None:
    found = _import("qwen3_omni_async_chunk")
    assert found.pipeline["edges"] == [
        _edge("thinker", "talker", transform="qwen3_omni.thinker2talker"),
        _edge("talker", "code2wav", transform="qwen3_omni.talker2code2wav", chunk=STREAMED),
    ]
    assert found.stages["thinker"]["options"]["tensor_parallel_size"] == 2
    assert found.stages["thinker"]["options"]["device_ids"] == [0, 1]
    assert not any("custom_process" in path for path in found.not_carried | found.not_needed)


def test_codes_are_sent_as_a_whole_without_async_chunks() -> None:
    edges = _import("qwen3_omni_whole").pipeline["edges"]
    assert [edge.get("chunk") for edge in edges] == [None, "whole"]


def test_a_deploy_config_has_the_graph_of_its_name() -> None:
    found = _import("qwen3_omni_moe")
    assert found.pipeline["edges"] == [
        _edge("thinker", "talker", transform="qwen3_omni.thinker2talker", connector="shm"),
        _edge(
            "talker",
            "code2wav",
            transform="qwen3_omni.talker2code2wav",
            connector="shm",
            chunk={"frames": 20, "initial_frames": 4},
        ),
    ]
    assert found.pipeline["outputs"] == {"text": "thinker.text", "audio": "code2wav.audio"}
    assert found.stages["talker"]["replicas"] == 2
    assert found.stages["talker"]["options"]["dtype"] == "bfloat16"
    assert found.not_carried == {"dtype", "platforms.npu", "stages[1].devices"}
    assert found.not_needed == {"connectors.memory.extra.codec_left_context_frames", "stages[2].enforce_eager"}


def test_an_overlay_is_merged_with_its_base() -> None:
    found = _import("overlay")
    talker = found.stages["talker"]["options"]
    assert talker["override_generation_config"] == {"temperature": 0.9, "top_k": 3}
    assert talker["gpu_memory_utilization"] == 0.5
    assert found.pipeline["edges"][1]["chunk"] == {"frames": 20, "ramp": [4, 8]}
    assert "qwen3_omni_moe.yaml: stages[1].devices" in found.not_carried


def test_stages_that_a_deploy_config_omits_have_defaults() -> None:
    found = _import("qwen3_omni_sparse")
    assert list(found.stages) == ["thinker", "talker", "code2wav"]
    assert found.pipeline["edges"][1]["chunk"] == STREAMED


def test_the_graph_of_a_deploy_config_can_be_set(tmp_path: Path) -> None:
    renamed = tmp_path / "mine.yaml"
    renamed.write_text((CONFIGS / "qwen3_tts.yaml").read_text())
    ran = invoke("pipeline", "import", str(renamed))
    assert (ran.exit_code, ran.stdout) == (ExitCode.FAILED, "")
    assert ran.stderr.startswith("missing: pipeline: the file does not name its graph of stages; set --topology")
    ran = invoke("pipeline", "import", str(renamed), "--topology", "qwen3_tts", "--name", "voice", "--model", "my/tts")
    assert (ran.exit_code, yaml.safe_load(ran.stdout)["pipeline"]) == (0, "voice")
    assert {stage["model"] for stage in yaml.safe_load(ran.stdout)["stages"].values()} == {"my/tts"}


def test_qwen3_tts_gets_a_prompt_stage() -> None:
    found = _import("qwen3_tts")
    assert [(name, stage.get("function")) for name, stage in found.stages.items()] == [
        ("prompt", "qwen3_tts.prompt"),
        ("talker", None),
        ("codec-decoder", "qwen3_tts.codec_decoder"),
    ]
    assert found.pipeline["edges"] == [
        _edge("prompt", "talker"),
        _edge("prompt", "codec-decoder"),
        _edge(
            "talker",
            "codec-decoder",
            transform="qwen3_tts.talker2codec_decoder",
            connector="shm",
            chunk={"frames": 25, "initial_frames": 1},
        ),
    ]
    assert found.stages["talker"]["options"]["override_generation_config"]["min_new_tokens"] == 2
    assert found.not_carried == {"stages[0].subtalker_sampling_params"}


def test_qwen3_tts_is_found_by_its_architecture() -> None:
    found = _import("qwen3_tts_stage_args")
    assert found.pipeline["edges"][2]["chunk"] == {"frames": 25}
    assert found.not_carried == {"stage_args[1].tts_args"}


def test_a_diffusion_model_is_one_stage() -> None:
    found = _import("qwen_image")
    assert found.pipeline["stages"] == {
        "dit": {
            "engine": "diffusion",
            "model": "${STAGEMESH_MODEL:-Qwen-Image}",
            "options": {
                "max_batch": 2,
                "load": {"offload": "model"},
                "parallel": {"ulysses": 2},
                "height": 512,
                "width": 768,
                "num_inference_steps": 250,
                "guidance_scale": 4.0,
                "max_inference_steps": 250,
            },
        }
    }
    assert found.pipeline["outputs"] == {"image": "dit.image"}
    assert found.not_carried == {
        "stage_args[0].default_sampling_params.seed",
        "stage_args[0].engine_args.gpu_memory_utilization",
        "stage_args[0].runtime.devices",
    }


def test_the_step_cache_of_a_diffusion_model_is_kept() -> None:
    found = _import("qwen_image_cached")
    (stage,) = found.stages.values()
    assert stage["options"] == {
        "dtype": "bfloat16",
        "load": {"compile": True},
        "step_cache": {"kind": "cache_dit", "first_blocks": 1, "warmup_steps": 4, "threshold": 0.12},
    }


def test_settings_of_another_step_cache_are_reported(tmp_path: Path) -> None:
    text = (CONFIGS / "qwen_image_cached.yaml").read_text().replace("cache_dit", "tea_cache")
    (tmp_path / "config.yaml").write_text(text)
    shown = invoke("pipeline", "import", str(tmp_path / "config.yaml")).stderr
    assert "not carried over: stages[0].cache_backend: the engine has no step cache tea_cache" in shown
    assert "not carried over: stages[0].cache_config.max_warmup_steps: " in shown


def test_a_stage_config_has_no_topology() -> None:
    ran = invoke("pipeline", "import", str(CONFIGS / "qwen_image.yaml"), "--topology", "qwen3_tts")
    assert (ran.exit_code, "--topology is for deploy configs" in ran.stderr) == (ExitCode.USAGE, True)


def test_a_file_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    ran = invoke("pipeline", "import", str(CONFIGS / "qwen_image.yaml"), "--output", str(tmp_path / "no" / "x.yaml"))
    assert (ran.exit_code, "set --output to another file" in ran.stderr) == (ExitCode.USAGE, True)


def test_parts_of_a_diffusion_model_are_three_stages() -> None:
    found = _import("qwen_image_three_stages")
    assert {name: stage["options"] for name, stage in found.stages.items()} == {
        "encode": {"part": "encode", "guidance_scale": 4.0},
        "denoise": {"part": "denoise", "max_batch": 1, "num_inference_steps": 40, "guidance_scale": 4.0},
        "decode": {"part": "decode"},
    }
    assert found.pipeline["edges"] == [_edge("encode", "denoise"), _edge("denoise", "decode")]


def test_a_video_is_encoded_from_frames() -> None:
    found = _import("wan_video")
    (name,) = found.stages
    video = {"from": f"{name}.frames", "media_type": "video/mp4", "frame_rate": 16}
    assert found.pipeline["outputs"] == {"video": video}
    assert found.stages[name]["options"]["max_frames"] == 81
    assert found.not_carried == {"stage_args[0].engine_args.cache_backend", "stage_args[0].engine_args.flow_shift"}


def test_an_unknown_language_model_needs_a_name() -> None:
    assert _import("language_model").missing == ["model"]
    found = _import("language_model", "--model", "my/model")
    assert found.stages == {
        "stage-0": {
            "engine": "vllm",
            "model": "my/model",
            # The text of the config, not the value of a variable.
            "options": {"max_model_len": 2048, "tokenizer": "$${TOKENIZER}"},
        }
    }
    assert found.not_carried == {"stage_args[0].engine_args.chat_color", "stage_args[0].engine_args.worker_cls"}


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("bagel", ["stage_args[1].engine_input_source", "stage_args[1].engine_args.omni_kv_config"]),
        ("bagel_deploy", ["pipeline"]),
        ("mimo_audio", ["stage_args[1].custom_process_input_func", "stage_args[1]"]),
        ("no_output", ["final_output"]),
        (
            "qwen3_omni_prefill_decode",
            ["stage_args[1].engine_input_source", "stage_args[0].is_prefill_only", "stage_args[1].is_decode_only"],
        ),
        ("qwen3_tts_one_stage", ["stage_args[0]"]),
        ("skyreels_video", ["stage_args[0].engine_args.model_class_name"]),
    ],
)
def test_what_prevents_a_pipeline_is_listed(name: str, missing: list[str]) -> None:
    assert _import(name, "--model", "my/model").missing == missing


def test_mistakes_of_the_result_are_missing(tmp_path: Path) -> None:
    text = (CONFIGS / "qwen_image.yaml").read_text().replace("height: 512", "height: 0")
    (tmp_path / "config.yaml").write_text(text)
    ran = invoke("pipeline", "import", str(tmp_path / "config.yaml"))
    assert (ran.exit_code, ran.stdout) == (ExitCode.FAILED, "")
    assert "missing: pipeline file: stages.dit.options: " in ran.stderr


def test_the_report_goes_to_stderr() -> None:
    ran = invoke("pipeline", "import", str(CONFIGS / "qwen2_5_omni.yaml"))
    assert yaml.safe_load(ran.stdout)["pipeline"] == "qwen2-5-omni"
    assert (
        "not carried over: stage_args[0].default_sampling_params.seed: a seed belongs to a request; set it there "
        "(`stagemesh generate --seed`)\n"
    ) in ran.stderr


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not valid YAML"),
        ("a: &a [*a]", "contains itself by an alias"),
        ("[1]", "it has neither `stage_args` nor `stages`"),
        ("stages: {a: {engine: fake}}", "is a pipeline file of Stagemesh already"),
        ("stage_args: []", "stage_args: "),
        ("stage_args: [{engine_args: {}}]", "stage_args[0].stage_id: it is missing"),
        ("stage_args: [{stage_id: x}]", "stage_args[0].stage_id: input should be a valid integer"),
        ("stage_args: [{stage_id: 0}, {stage_id: 0}]", "stage_args[1].stage_id is 0, the id of stage_args[0]"),
        (
            "stage_args: [{stage_id: 0, engine_input_source: [3]}]",
            "stage_args[0].engine_input_source[0]: there is no stage 3",
        ),
        (
            "stage_args: [{stage_id: 0}]\nruntime: {edges: [{from: 0, to: 4}]}",
            "runtime.edges[0]: there is no stage 4",
        ),
        ("stage_args: [{stage_id: 0, engine_input_source: [0]}]", "stage 0 is its own input"),
        (
            "pipeline: qwen3_tts\nstages: [{stage_id: 0, output_connectors: {to_stage_1: shm}}]",
            "stages[0].output_connectors.to_stage_1: unknown connector 'shm'",
        ),
        ("pipeline: qwen3_tts\nstages: [{stage_id: 0, num_replicas: many}]", "stages[0].num_replicas is 'many'"),
        ("base_config: config.yaml\nstages: [{stage_id: 0}]", "is its own base"),
        ("base_config: other.yaml", "other.yaml cannot be read"),
    ],
)
def test_a_wrong_config_is_an_error_with_its_path(text: str, message: str, tmp_path: Path) -> None:
    assert message in _refuse(tmp_path, text)


def test_all_mistakes_of_a_kind_are_reported_at_once(tmp_path: Path) -> None:
    shown = _refuse(tmp_path, "stage_args: [{runtime: 3}, {stage_id: 1, engine_args: x}]")
    assert all(
        path in shown for path in ("stage_args[0].stage_id", "stage_args[0].runtime", "stage_args[1].engine_args")
    )


def test_copied_arguments_are_arguments_of_vllm() -> None:
    arguments = pytest.importorskip("vllm.engine.arg_utils").AsyncEngineArgs
    assert {*arguments.__dataclass_fields__} >= VLLM_ARGUMENTS


def test_the_known_diffusion_classes_are_those_of_the_engine() -> None:
    assert DIFFUSION_CHECKPOINTS.keys() == FAMILIES.keys()
