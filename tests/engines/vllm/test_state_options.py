"""Hidden states that a stage cannot emit are rejected before its engine starts, with a remedy."""

import json
from pathlib import Path

import pytest
from pydantic import JsonValue

from stagemesh.common.errors import InvalidRequestError, NotReadyError
from tests.engines.vllm.engines import started, started_with_arena
from tests.engines.vllm.tiny_model import OPTIONS, write_tiny_model
from tests.rpc.call_errors import raises

pytestmark = pytest.mark.timeout(120)


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
        async with started(write_tiny_model(tmp_path / "model"), hidden_states=states, **options):
            pass
    assert "hidden_states" in caught.value.message


async def test_inner_layers_of_an_unsuited_model_are_rejected(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model")
    config = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 2}
    (model / "config.json").write_text(json.dumps({**config, "vocab_size": 300, "n_positions": 128}))
    states: JsonValue = {"layers": ["last", 1], "share_bytes": 65536}
    with pytest.raises(InvalidRequestError, match="GPT2LMHeadModel provides no states of inner layers; request only"):
        async with started_with_arena(model, **OPTIONS, hidden_states=states):
            pass


async def test_error_names_an_unreadable_model(tmp_path: Path) -> None:
    with raises(NotReadyError, reason="LOAD_FAILED", match="vLLM cannot load"):
        async with started(tmp_path, hidden_states={"layers": ["last", 1]}):
            pass
