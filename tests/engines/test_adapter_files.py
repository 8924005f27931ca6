"""Reading an adapter's folder, and rejecting a folder that holds none."""

from collections.abc import Callable
from pathlib import Path

import pytest

from stagemesh.common.errors import InvalidRequestError
from stagemesh.services.engines.adapter_files import Sizes, read_adapter
from tests.engines.vllm.tiny_adapter import set_config, write_adapter
from tests.rpc.call_errors import raises

LAYER = "base_model.model.model.layers.1.mlp.down_proj"
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def test_rank_and_layer_sizes_are_read(tmp_path: Path) -> None:
    files = read_adapter(str(write_adapter(tmp_path, rank=3)))
    assert (files.rank, len(files.layers), files.layers[LAYER]) == (3, 10, Sizes(128, 64))


def test_the_largest_rank_of_any_layer_counts(tmp_path: Path) -> None:
    set_config(write_adapter(tmp_path), rank_pattern={"q_proj": 32})
    assert read_adapter(str(tmp_path)).rank == 32


def test_layers_must_match_the_model(tmp_path: Path) -> None:
    files = read_adapter(str(write_adapter(tmp_path)))
    files.check(files.layers)
    files.check(dict.fromkeys(files.layers))
    with pytest.raises(
        InvalidRequestError, match="down_proj has 128 inputs and 64 outputs in the adapter but 128 and 96"
    ):
        files.check({**files.layers, LAYER: Sizes(128, 96)})
    with pytest.raises(InvalidRequestError, match="down_proj, which the model does not have"):
        files.check({name: sizes for name, sizes in files.layers.items() if name != LAYER})


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: (folder / CONFIG).unlink(), "no readable adapter_config.json"),
        (lambda folder: (folder / CONFIG).write_text("{"), "does not describe a LoRA"),
        (lambda folder: (folder / CONFIG).write_text("[]"), "does not describe a LoRA"),
        (lambda folder: set_config(folder, r=0), "does not describe a LoRA: r "),
        (lambda folder: set_config(folder, peft_type="IA3"), "does not describe a LoRA: peft_type"),
        (lambda folder: (folder / WEIGHTS).unlink(), "no readable adapter_model.safetensors"),
        (lambda folder: (folder / WEIGHTS).write_bytes(b"\0" * 40), "not a safetensors file"),
        (lambda folder: (folder / WEIGHTS).write_bytes(b"\2" + b"\0" * 7 + b"{}"), "contains no LoRA"),
    ],
)
def test_the_error_names_what_a_folder_lacks(spoil: Callable[[Path], object], message: str, tmp_path: Path) -> None:
    spoil(write_adapter(tmp_path))
    with raises(InvalidRequestError, reason="INVALID_ADAPTER", match=message) as caught:
        read_adapter(str(tmp_path))
    assert str(tmp_path) in caught.value.message


@pytest.mark.parametrize("path", ["adapters/mine", "/nowhere/to/be/found", ""])
def test_the_path_must_be_an_existing_absolute_folder(path: str) -> None:
    with pytest.raises(InvalidRequestError, match="absolute path of a folder"):
        read_adapter(path)
