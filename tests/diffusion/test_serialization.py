"""Serialization of requests: values survive a round trip, and invalid data raises InvalidChunkError."""

import io
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from stagemesh.common.errors import InternalError, InvalidChunkError
from stagemesh.services.engines.diffusion.serialization import deserialize, serialize, tensors_of

CPU = torch.device("cpu")
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
INTEGERS = (torch.int64, torch.int32, torch.int8, torch.uint8)
DTYPES = (*FLOATS, *INTEGERS, torch.bool)


def tensors() -> st.SearchStrategy[torch.Tensor]:
    """Generates any shape, including shapes of scalars and of empty tensors."""

    def draw(shape: list[int], dtype: torch.dtype, seed: int) -> torch.Tensor:
        return torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)

    return st.builds(draw, st.lists(st.integers(0, 3), max_size=4), st.sampled_from(DTYPES), st.integers(0, 99))


def generators() -> st.SearchStrategy[torch.Generator]:
    """Generates generators in different states."""
    return st.builds(lambda seed: torch.Generator().manual_seed(seed), st.integers(0, 1 << 62))


def trees() -> st.SearchStrategy[Any]:
    plain = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.sampled_from(DTYPES))
    arrays = tensors().filter(lambda tensor: tensor.dtype != torch.bfloat16).map(lambda tensor: tensor.numpy())
    return st.recursive(
        st.one_of(plain, tensors(), arrays, generators()),
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.lists(inner, max_size=3).map(tuple),
            st.dictionaries(st.text(), inner, max_size=3),
        ),
        max_leaves=8,
    )


def there_and_back(tree: dict[str, Any]) -> dict[str, Any]:
    return deserialize(serialize(tree, kind="state", model="m"), kind="state", model="m", device=CPU)


def bits(value: Any) -> object:
    """Returns a value that is equal for trees of equal types and bits."""
    found: Any = value
    kind = type(found).__name__
    match value:
        case torch.Tensor():
            return kind, value.dtype, value.shape, value.tolist()
        case np.ndarray():
            return kind, found.dtype.str, found.shape, found.tolist()
        case torch.Generator():
            return kind, value.get_state().tolist()
        case dict():
            return kind, [(name, bits(each)) for name, each in found.items()]
        case list() | tuple():
            return kind, [bits(each) for each in found]
        case _:
            return kind, repr(value)


@given(st.dictionaries(st.text(), trees(), max_size=4))
@settings(deadline=None)
def test_serialized_trees_survive_a_round_trip(tree: dict[str, Any]) -> None:
    assert bits(there_and_back(tree)) == bits(tree)


def test_a_repeated_tensor_is_stored_once() -> None:
    tensor = torch.arange(1000)
    made = there_and_back({"a": tensor, "b": [tensor]})
    assert made["a"] is made["b"][0]
    assert serialize({"a": tensor, "b": tensor}, kind="k", model="m").nbytes < 1.2 * tensor.nbytes


def test_views_of_one_tensor_are_stored_separately() -> None:
    whole = torch.arange(12.0).view(3, 4)
    tree = {"row": whole[0], "column": whole[:, 1], "turned": whole.T}
    assert bits(there_and_back(tree)) == bits(tree)


def test_serialized_tensors_are_copies() -> None:
    tensor = torch.zeros(3)
    packed = serialize({"t": tensor}, kind="k", model="m")
    tensor += 1
    assert not deserialize(packed, kind="k", model="m", device=CPU)["t"].any()


def test_shapes_and_numpy_numbers_become_python_values() -> None:
    made = there_and_back({"shape": torch.Size([2, 3]), "number": np.float32(0.5)})
    assert bits(made) == bits({"shape": (2, 3), "number": 0.5})


def test_a_generator_keeps_its_state() -> None:
    generator = torch.Generator().manual_seed(7)
    torch.rand(5, generator=generator)
    other = there_and_back({"g": generator})["g"]
    assert torch.equal(torch.rand(5, generator=other), torch.rand(5, generator=generator))


@pytest.mark.parametrize("value", [object(), torch.nn.Linear(2, 2), len, b"bytes", {1, 2}, 1j])
def test_unsupported_values_are_not_serialized(value: object) -> None:
    with pytest.raises(InternalError, match="cannot be serialized"):
        serialize({"v": value}, kind="k", model="m")


def test_tensors_of_a_tree_are_returned_once() -> None:
    first, second = torch.zeros(1), torch.ones(2)
    assert [tensor.numel() for tensor in tensors_of({"a": [first, (second, first)], "b": 3})] == [1, 2]


# -- invalid data


PACKED = serialize({"t": torch.arange(64.0), "g": torch.Generator(), "n": [1, (2.5, None)]}, kind="state", model="m")


def taken(data: bytes) -> dict[str, Any]:
    return deserialize(np.frombuffer(data, np.uint8), kind="state", model="m", device=CPU)


def refused(data: bytes) -> bool:
    """Returns whether the data raises InvalidChunkError. Other exceptions fail the test."""
    try:
        made = taken(data)
    except InvalidChunkError:
        return True
    assert isinstance(made, dict)
    return False


@pytest.mark.parametrize(
    ("kind", "model", "error"),
    [
        ("latents", "m", "latents has the kind 'state', but this stage accepts 'latents'"),
        ("state", "other", "state has the model 'm', but this stage accepts 'other'"),
    ],
)
def test_data_of_another_kind_or_model_is_rejected(kind: str, model: str, error: str) -> None:
    with pytest.raises(InvalidChunkError, match=error):
        deserialize(PACKED, kind=kind, model=model, device=CPU)


def test_data_of_another_version_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stagemesh.services.engines.diffusion.serialization.VERSION", 2)
    with pytest.raises(InvalidChunkError, match="state has the version 1, but this stage accepts 2"):
        deserialize(PACKED, kind="state", model="m", device=CPU)


@given(st.integers(0, PACKED.nbytes - 1))
@settings(deadline=None)
def test_truncated_data_is_rejected(length: int) -> None:
    assert refused(PACKED.tobytes()[:length])


@given(st.lists(st.tuples(st.integers(0, 700), st.integers(0, 255)), min_size=1, max_size=4))
@settings(deadline=None, max_examples=400)
def test_damaged_bytes_are_rejected_or_are_data(places: list[tuple[int, int]]) -> None:
    data = bytearray(PACKED.tobytes())
    for at, value in places:
        data[at] = value
    refused(bytes(data))


@given(st.binary(max_size=300))
@settings(deadline=None)
def test_foreign_bytes_are_rejected(data: bytes) -> None:
    assert refused(data)


def header(tree: Any, **changed: Any) -> bytes:
    """Returns a file with one tensor whose metadata contains the tree."""
    head = {"version": 1, "kind": "state", "model": "m", "tree": tree, "all_on_cpu": True} | changed
    return file(json.dumps(head))


def file(text: str) -> bytes:
    return save({"0": torch.zeros(2)}, {"stagemesh": text})


KEYS = st.sampled_from(["tensor", "array", "dtype", "generator", "device", "cpu", "tuple", "list", "dict", "x"])
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-3, 3), st.floats(), st.sampled_from(["cpu", "float32", "x", ""])),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(KEYS, inner, max_size=2)),
    max_leaves=8,
)


@given(JSON)
@settings(deadline=None, max_examples=500, suppress_health_check=[HealthCheck.too_slow])
def test_arbitrary_outlines_are_rejected_or_are_data(tree: Any) -> None:
    refused(header(tree))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x80\x04\x95",
        *(file(text) for text in ("[]", "3", '"text"', "{", "[" * 100_000, '{"a":' * 100_000)),
        save({"0": torch.zeros(2)}, {"other": "x"}),
        save({"name": torch.zeros(2)}, {"stagemesh": "{}"}),
        *(header({}), header([]), header(None), header({"list": []})),
        *(header({"dict": items}) for items in ([["a", {}]], [[["a"], 1]], [["a"]], 3)),
        header({"dict": [["a", {"tensor": 9, "cpu": True}]]}),
        header({"dict": [["a", {"tensor": float("inf"), "cpu": True}]]}),
        header({"dict": [["a", {"tensor": 0}]]}),
        header({"dict": [["a", {"generator": 0, "device": "cpu"}]]}),
        header({"dict": [["a", {"generator": 0, "device": "nowhere"}]]}),
        header({"dict": [["a", {"code": "print"}]]}),
        header({"dict": []}, all_on_cpu=None, version="1"),
        json.dumps({"__metadata__": {}}).encode(),
    ],
)
def test_malicious_files_are_rejected(data: bytes) -> None:
    with pytest.raises(InvalidChunkError):
        taken(data)


def _never(path: str) -> None:
    Path(path).touch()


def test_deserialization_runs_no_code(tmp_path: Path) -> None:
    marker = tmp_path / "ran"

    class Runs:
        def __reduce__(self) -> tuple[Any, ...]:
            return (_never, (str(marker),))

    file_of_torch = io.BytesIO()
    torch.save(Runs(), file_of_torch)
    for data in (pickle.dumps(Runs()), file_of_torch.getvalue()):
        assert refused(data)
    assert not marker.exists()
