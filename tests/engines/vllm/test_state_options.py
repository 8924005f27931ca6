"""Hidden states that a stage cannot emit are rejected before its engine starts, with a remedy."""

import json
from pathlib import Path

import pytest
from pydantic import JsonValue

from stagemesh.common.errors import InvalidRequestError, NotReadyError
from stagemesh.connectors.data_plane import DataPlane
from stagemesh.services.engines.abilities import PartitionsArena
from stagemesh.services.engines.vllm.engine import VllmEngine
from tests.engines.support import hand_partitions, stage_config
from tests.engines.vllm.tiny_model import OPTIONS, write_tiny_model

pytestmark = pytest.mark.timeout(120)


async def start(model: Path, states: JsonValue, *, arena: PartitionsArena | None = None, **options: JsonValue) -> None:
    config = stage_config("vllm", model=str(model), options={"hidden_states": states, **options})
    engine = VllmEngine(config)
    if arena is not None:
        hand_partitions(engine, arena)
    try:
        await engine.start(lambda _: None)
    finally:
        await engine.close()


@pytest.mark.parametrize(
    ("states", "options", "remedy"),
    [
        ({"layers": [2]}, {}, "layers contains 2; the model has layers 0 to 1 and `last`"),
        ({"layers": ["last", 1]}, {"pipeline_parallel_size": 2}, "request only `last`"),
        ({}, {"runner": "pooling"}, "a model that pools .* omit the option"),
        ({"layers": ["last", 0], "share_bytes": 3000}, {}, "share_bytes is 3000; .* need at least 3072"),
        ({"share_bytes": -1}, {}, "share_bytes is -1"),
        ({"layers": [-1]}, {}, "layers count from 0"),
        ({"layers": []}, {}, "name each wanted layer once"),
        ({"layers": ["first"]}, {}, "'first'"),
        ({"dtype": "int8"}, {}, "float32"),
        ({"tokens": "last"}, {}, "tokens"),
    ],
)
async def test_impossible_states_are_rejected(
    tmp_path: Path, states: JsonValue, options: dict[str, JsonValue], remedy: str
) -> None:
    with pytest.raises(InvalidRequestError, match=remedy) as caught:
        await start(write_tiny_model(tmp_path / "model"), states, **options)  # type: ignore[arg-type]  # none is `arena`
    assert "hidden_states" in caught.value.message


async def test_inner_layers_of_an_unsuited_model_are_rejected(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model")
    config = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 2}
    (model / "config.json").write_text(json.dumps({**config, "vocab_size": 300, "n_positions": 128}))
    plane = DataPlane(replica="tested-0", pipeline="p", generation="1", arena_bytes=4 << 20)
    try:
        with pytest.raises(
            InvalidRequestError, match="GPT2LMHeadModel provides no states of inner layers; request only"
        ):
            await start(model, {"layers": ["last", 1], "share_bytes": 65536}, arena=plane.arena, **OPTIONS)
    finally:
        await plane.close()


async def test_error_names_an_unreadable_model(tmp_path: Path) -> None:
    with pytest.raises(NotReadyError, match="vLLM cannot load") as caught:
        await start(tmp_path, {"layers": ["last", 1]})
    assert caught.value.reason == "LOAD_FAILED"
