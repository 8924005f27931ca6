"""Edges that carry hand-over tickets, and `split`, which divides a vllm stage into a prefill and a decode stage."""

from functools import partial
from pathlib import Path

import pytest
import yaml

from stagemesh.cli.pipelines.pipeline_graph import draw_mermaid
from stagemesh.common.errors import InvalidRequestError
from stagemesh.common.plugins.descriptors import Emitted, EngineDescriptor, Signature
from stagemesh.common.wire.tensors import TensorSpec
from stagemesh.orchestrator.request.parameters import check_parameters, parameters_of
from stagemesh.v1 import request_pb2
from tests.pipeline.files import good, load

TICKETS = good("tickets")

WITH_TRANSFORM = """\
pipeline: split
stages:
  prefill: {engine: test, function: prefill}
  decode: {engine: test, function: decode}
edges: [{from: prefill, to: decode, transform: text.upper}]
outputs: {text: decode}
"""
_TEXT, _TICKET = TensorSpec.parse("uint8[bytes]"), TensorSpec.ticket("vllm.kv")


def test_an_edge_carries_the_tickets_that_its_consumer_accepts(tmp_path: Path) -> None:
    pipeline = load(tmp_path, TICKETS)
    assert pipeline.edges[0].tensors == ("kv",)
    assert pipeline.stages["decode"].signature.accepts == {"kv": TensorSpec.ticket("vllm.kv")}
    assert pipeline.stages["decode"].signature.takes_prompt


def test_a_transform_passes_tickets(tmp_path: Path) -> None:
    signatures = {
        "prefill": Signature(emits={"text": Emitted(_TEXT), "kv": Emitted(_TICKET)}),
        "decode": Signature(accepts={"text": _TEXT, "kv": _TICKET}, emits={"text": Emitted(_TEXT)}),
    }
    engine = EngineDescriptor(factory="", signature=lambda name, _: signatures[name or ""], needs_model=False)
    edge = load(tmp_path, WITH_TRANSFORM, engines={"test": engine}).edges[0]
    assert (edge.tensors, edge.brings) == (("text", "kv"), ("kv", "text"))


SPLIT = good("split")


load_split = partial(load, engines=None, check_models=False)


def test_both_stages_are_those_that_a_user_could_have_written(tmp_path: Path) -> None:
    pipeline = load_split(tmp_path, SPLIT)
    prefill, decode = pipeline.stages["thinker-prefill"], pipeline.stages["thinker"]
    assert (prefill.replicas, decode.replicas) == (2, 5)
    assert prefill.options["kv_handover"] == {"role": "prefill", "wait_s": 9.0}
    assert decode.options["kv_handover"] == {"role": "decode", "wait_s": 9.0}
    assert prefill.options.keys() == {"dtype", "enable_lora", "kv_handover"} == decode.options.keys()
    assert prefill.stall_s == decode.stall_s == 7
    assert [edge.edge_name for edge in pipeline.edges] == ["thinker-prefill->thinker"]
    assert pipeline.edges[0].tensors == ("kv_cache",)


def test_content_of_a_divided_pipeline_loads_as_the_same_pipeline(tmp_path: Path) -> None:
    pipeline = load_split(tmp_path, SPLIT)
    assert "split" not in str(pipeline.content)
    assert "${MODEL:-small}" in str(pipeline.content["stages"])
    again = load_split(tmp_path, yaml.safe_dump(pipeline.content))
    assert (again.stages, again.edges, again.generation) == (pipeline.stages, pipeline.edges, pipeline.generation)


def test_a_request_runs_both_stages_or_none(tmp_path: Path) -> None:
    pipeline = load_split(tmp_path, SPLIT)
    assert [stage.name for stage in pipeline.route(["text"]).stages] == ["thinker-prefill", "thinker"]
    assert [stage.name for stage in pipeline.route(["echo"]).stages] == ["echo"]


def test_values_keep_the_lines_of_the_file(tmp_path: Path) -> None:
    origins = {row.key: row.origin.rpartition(":")[2] for row in load_split(tmp_path, SPLIT).explanation}
    assert origins["stages.thinker-prefill.replicas"] == origins["stages.thinker.replicas"] == "11"
    assert origins["stages.thinker-prefill.options.dtype"] == "9"
    assert origins["stages.thinker-prefill.options.kv_handover.wait_s"] == "11"
    assert origins["edges.0.from"] == "11"


def test_overrides_change_the_numbers_of_replicas(tmp_path: Path) -> None:
    pipeline = load_split(tmp_path, SPLIT, overrides={"stages.thinker.split.decode": "8"})
    assert [pipeline.stages[name].replicas for name in ("thinker-prefill", "thinker")] == [2, 8]


def test_drawing_shows_the_prompt_at_both_stages(tmp_path: Path) -> None:
    drawing = draw_mermaid(load_split(tmp_path, SPLIT))
    assert drawing.count("prompt --> ") == 3
    assert '-->|"auto, one chunk per step"|' in drawing


@pytest.mark.parametrize("named", [True, False])
def test_prefill_stage_has_the_adapter_of_the_stage_but_no_sampling(tmp_path: Path, *, named: bool) -> None:
    pipeline = load_split(tmp_path, SPLIT)
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
        check_parameters(parameters, load_split(tmp_path, SPLIT))
