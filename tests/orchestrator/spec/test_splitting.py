"""`split`, which divides a vllm stage of a pipeline file into a prefill stage and a decode stage."""

from pathlib import Path

import pytest

from stagemesh.cli.pipelines.pipeline_graph import draw_mermaid
from stagemesh.common.errors import InvalidPipelineError, InvalidRequestError
from stagemesh.orchestrator.request.parameters import check_parameters, parameters_of
from stagemesh.pipeline import Pipeline, load_pipeline
from stagemesh.v1 import request_pb2

SPLIT = """\
pipeline: chat
main_stage: thinker
stages:
  echo: {engine: vllm, model: small, replicas: 3}
  thinker:
    engine: vllm
    model: ${MODEL:-small}
    stall_s: 7
    options: {dtype: float32, enable_lora: true}
    when: {output: text}
    split: {prefill: 2, decode: 5, wait_s: 9}
outputs: {text: thinker.text, echo: echo.text}
"""


def _load(folder: Path, text: str = SPLIT, *, overrides: dict[str, str] | None = None) -> Pipeline:
    path = folder / "chat.yaml"
    path.write_text(text)
    return load_pipeline(str(path), check_models=False, variables={}, overrides=overrides)


def test_both_stages_are_those_that_a_user_could_have_written(tmp_path: Path) -> None:
    pipeline = _load(tmp_path)
    prefill, decode = pipeline.stages["thinker-prefill"], pipeline.stages["thinker"]
    assert (prefill.replicas, decode.replicas) == (2, 5)
    assert prefill.options["kv_handover"] == {"role": "prefill", "wait_s": 9.0}
    assert decode.options["kv_handover"] == {"role": "decode", "wait_s": 9.0}
    assert prefill.options.keys() == {"dtype", "enable_lora", "kv_handover"} == decode.options.keys()
    assert prefill.stall_s == decode.stall_s == 7
    assert [edge.edge_name for edge in pipeline.edges] == ["thinker-prefill->thinker"]
    assert pipeline.edges[0].tensors == ("kv_cache",)


def test_content_of_a_divided_pipeline_loads_as_the_same_pipeline(tmp_path: Path) -> None:
    import yaml

    pipeline = _load(tmp_path)
    assert "split" not in str(pipeline.content)
    assert "${MODEL:-small}" in str(pipeline.content["stages"])
    again = _load(tmp_path, yaml.safe_dump(pipeline.content))
    assert (again.stages, again.edges, again.generation) == (pipeline.stages, pipeline.edges, pipeline.generation)


def test_a_request_runs_both_stages_or_none(tmp_path: Path) -> None:
    pipeline = _load(tmp_path)
    assert [stage.name for stage in pipeline.route(["text"]).stages] == ["thinker-prefill", "thinker"]
    assert [stage.name for stage in pipeline.route(["echo"]).stages] == ["echo"]


def test_values_keep_the_lines_of_the_file(tmp_path: Path) -> None:
    origins = {row.key: row.origin.rpartition(":")[2] for row in _load(tmp_path).explanation}
    assert origins["stages.thinker-prefill.replicas"] == origins["stages.thinker.replicas"] == "11"
    assert origins["stages.thinker-prefill.options.dtype"] == "9"
    assert origins["stages.thinker-prefill.options.kv_handover.wait_s"] == "11"
    assert origins["edges.0.from"] == "11"


def test_overrides_change_the_numbers_of_replicas(tmp_path: Path) -> None:
    pipeline = _load(tmp_path, overrides={"stages.thinker.split.decode": "8"})
    assert [pipeline.stages[name].replicas for name in ("thinker-prefill", "thinker")] == [2, 8]


def test_drawing_shows_the_prompt_at_both_stages(tmp_path: Path) -> None:
    drawing = draw_mermaid(_load(tmp_path))
    assert drawing.count("prompt --> ") == 3
    assert '-->|"auto, one chunk per step"|' in drawing


@pytest.mark.parametrize("named", [True, False])
def test_prefill_stage_has_the_adapter_of_the_stage_but_no_sampling(tmp_path: Path, *, named: bool) -> None:
    pipeline = _load(tmp_path)
    given = request_pb2.StageParameters(sampling=request_pb2.Sampling(top_k=3), adapter="poet")
    parameters = request_pb2.Parameters(sampling=given.sampling, adapter=given.adapter)
    if named:
        parameters = request_pb2.Parameters(stages={"thinker": given})
    check_parameters(parameters, pipeline)
    assert parameters_of(pipeline.stages["thinker"], parameters) == given
    assert parameters_of(pipeline.stages["thinker-prefill"], parameters) == request_pb2.StageParameters(adapter="poet")


def test_parameters_cannot_name_the_prefill_stage(tmp_path: Path) -> None:
    parameters = request_pb2.Parameters(stages={"thinker-prefill": request_pb2.StageParameters(adapter="poet")})
    with pytest.raises(InvalidRequestError, match=r"has the stages echo, thinker$"):
        check_parameters(parameters, _load(tmp_path))


CASES: dict[str, tuple[str, str, str]] = {
    "another engine": ("engine: vllm\n", "engine: fake\n",
        "11: stage 'thinker' cannot be split, because only engine 'vllm' can; remove split"),
    "replicas, too": ("stall_s: 7", "replicas: 7",
        "8: stage 'thinker' has both replicas and split, which has the numbers of replicas; remove replicas"),
    "the option, too": ("dtype: float32", "kv_handover: {role: decode}",
        "9: split sets the option kv_handover of stage 'thinker'; remove the option, or split"),
    "name that is taken": ("  echo:", "  thinker-prefill:",
        "11: the prefill stage of 'thinker' would be named 'thinker-prefill', which exists; rename one of them"),
    "no prefill": ("{prefill: 2, ", "{",
        "11: stages.thinker.split has no 'prefill'; add it"),
    "no replica": ("decode: 5", "decode: 0",
        "11: stages.thinker.split.decode is 0; input should be greater than or equal to 1"),
    "unknown key": ("wait_s: 9", "wait: 9",
        "11: unknown key 'stages.thinker.split.wait'; did you mean 'wait_s'?"),
    "hidden states": ("dtype: float32", "hidden_states: {}",
        ("9: option hidden_states excludes split and kv_handover, because a decode stage does not compute the tokens "
        "of the prompt; remove hidden_states, or do not split the stage")),
}  # fmt: skip


@pytest.mark.parametrize(("before", "after", "error"), CASES.values(), ids=CASES.keys())
def test_each_mistake_is_reported_at_its_line(tmp_path: Path, before: str, after: str, error: str) -> None:
    assert SPLIT.count(before) == 1
    with pytest.raises(InvalidPipelineError) as caught:
        _load(tmp_path, SPLIT.replace(before, after))
    assert caught.value.message == f"{tmp_path}/chat.yaml:{error}"
