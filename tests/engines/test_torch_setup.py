"""The state of torch that the engines and models of a process share."""

from importlib.metadata import entry_points

import pytest
import torch

from stagemesh.services.engines.torch_setup import declare_operators, set_up_torch
from tests.engines.torch_threads import one_torch_thread

__all__ = ["one_torch_thread"]


@pytest.mark.parametrize(
    ("variable", "threads"), [(None, 1), ("1", 1), ("2", 2), ("3,2", 3), ("0", 1), ("many", 1), ("", 1)]
)
@pytest.mark.parametrize("before", [1, 4])
def test_the_number_of_threads_depends_on_the_variable_alone(
    variable: str | None, threads: int, before: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS")
    if variable is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
    torch.set_num_threads(before)
    set_up_torch(torch.device("cpu"))
    assert torch.get_num_threads() == threads


def test_vllm_declares_the_operators_and_does_not_take_them_for_a_platform() -> None:
    (entry,) = entry_points(group="vllm.platform_plugins", name="stagemesh_torchvision")
    assert entry.load() is declare_operators
    declared: object = entry.load()()
    assert declared is None
