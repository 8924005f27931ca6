"""Validation of the option `parallel`."""

import pytest

from stagemesh.common.errors import InvalidRequestError
from stagemesh.services.engines.diffusion.options import ParallelOptions, stage_options


@pytest.mark.parametrize(
    ("options", "branch_ranks", "ranks"),
    [
        ({}, 1, 1),
        ({"cfg": 2}, 1, 2),
        ({"ulysses": 2, "hsdp": 2}, 2, 2),
        ({"cfg": 2, "ulysses": 4, "hsdp": 2}, 4, 8),
        ({"cfg": 2, "hsdp": 4}, 4, 8),
    ],
)
def test_processes_are_counted(options: dict[str, int], branch_ranks: int, ranks: int) -> None:
    parallel = ParallelOptions(**options)
    assert (parallel.branch_ranks, parallel.ranks) == (branch_ranks, ranks)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"parallel": {"cfg": 3}}, "parallel.cfg is 3: Input should be less than or equal to 2"),
        ({"parallel": {"ulysses": 0}}, "parallel.ulysses is 0: Input should be greater than 0"),
        ({"parallel": {"ulysses": 4, "hsdp": 3}}, "it must divide parallel.ulysses"),
        ({"parallel": {"tensor": 2}}, "parallel.tensor"),
        ({"parallel": {"hsdp": 2}, "enable_lora": True}, "weights are complete"),
        ({"parallel": {"cfg": 2}, "part": "decode"}, "stages that denoise"),
        ({"parallel": {"cfg": 2}, "step_cache": {"kind": "first_block"}}, "omit one of them"),
    ],
)
def test_invalid_parallel_options_are_rejected(options: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        stage_options(options)  # type: ignore[arg-type]
