"""Pipeline files whose edges carry hand-over tickets."""

from pathlib import Path

import pytest

from stagemesh.common.errors import InvalidPipelineError
from stagemesh.common.plugins.descriptors import Emitted, EngineDescriptor, Signature
from stagemesh.common.wire.tensors import TensorSpec
from stagemesh.pipeline import Catalog, Pipeline, load_pipeline
from tests.orchestrator.spec.catalog import CATALOG

GOOD = """\
pipeline: split
stages:
  prefill:
    engine: external
    addresses: ["10.0.0.1:1"]
    signature: {emits: {kv: "handover[vllm.kv]", first_token: "int32[one]"}}
  decode:
    engine: external
    addresses: ["10.0.0.2:1"]
    signature: {accepts: {kv: "handover[vllm.kv]"}, emits: {text: "uint8[bytes]"}, media: true}
edges:
  - {from: prefill, to: decode}
outputs: {text: decode}
"""

WITH_TRANSFORM = """\
pipeline: split
stages:
  prefill: {engine: test, function: prefill}
  decode: {engine: test, function: decode}
edges: [{from: prefill, to: decode, transform: text.upper}]
outputs: {text: decode}
"""
_TEXT, _TICKET = TensorSpec.parse("uint8[bytes]"), TensorSpec.ticket("vllm.kv")


def _load(folder: Path, text: str = GOOD) -> Pipeline:
    path = folder / "split.yaml"
    path.write_text(text)
    return load_pipeline(str(path), catalog=CATALOG, variables={})


def test_an_edge_carries_the_tickets_that_its_consumer_accepts(tmp_path: Path) -> None:
    pipeline = _load(tmp_path)
    assert pipeline.edges[0].tensors == ("kv",)
    assert pipeline.stages["decode"].signature.accepts == {"kv": TensorSpec.ticket("vllm.kv")}
    assert pipeline.stages["decode"].signature.takes_prompt


def test_a_transform_passes_tickets(tmp_path: Path) -> None:
    signatures = {
        "prefill": Signature(emits={"text": Emitted(_TEXT), "kv": Emitted(_TICKET)}),
        "decode": Signature(accepts={"text": _TEXT, "kv": _TICKET}, emits={"text": Emitted(_TEXT)}),
    }
    engine = EngineDescriptor(factory="", signature=lambda name, _: signatures[name or ""], needs_model=False)
    path = tmp_path / "split.yaml"
    path.write_text(WITH_TRANSFORM)
    catalog = Catalog(engine=lambda _: engine, transform=CATALOG.transform)
    edge = load_pipeline(str(path), catalog=catalog, variables={}).edges[0]
    assert (edge.tensors, edge.brings) == (("text", "kv"), ("kv", "text"))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            '{kv: "handover[vllm.kv]"}',
            '{kv: "handover[vllm.ec]"}',
            r"gives kv: handover\[vllm\.kv\], stage 'decode' expects",
        ),
        (
            '{kv: "handover[vllm.kv]"}',
            '{kv: "uint8[bytes]"}',
            r"gives kv: handover\[vllm\.kv\], stage 'decode' expects",
        ),
        ('{kv: "handover[vllm.kv]"}', '{kv: "handover[VLLM]"}', "is not a tensor type"),
        ('{kv: "handover[vllm.kv]"}', '{pages: "handover[vllm.kv]"}', r"accepts only pages: handover\[vllm\.kv\]"),
        (
            "to: decode}",
            "to: decode, chunk: whole}",
            r"carries a ticket \(kv: handover\[vllm\.kv\]\), which cannot be cut",
        ),
        ("to: decode}", "to: decode, chunk: {frames: 2}}", "which cannot be cut"),
        (
            "outputs: {text: decode}",
            "outputs: {text: decode, kv: prefill}",
            r"prefill\.kv is a ticket for another stage",
        ),
        ('emits: {kv: "handover[vllm.kv]",', 'emits: {kv: {type: "handover[vllm.kv]", kind: text},', "not for clients"),
        ("edges:\n  - {from: prefill, to: decode}\n", "edges: []\n", "no edge leads to stage 'decode'"),
    ],
)
def test_mistakes_are_reported(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in GOOD
    with pytest.raises(InvalidPipelineError, match=message):
        _load(tmp_path, GOOD.replace(old, new))
