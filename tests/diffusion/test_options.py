"""Validation of the options of a diffusion stage."""

import math
from typing import Any

import pytest

from stagemesh.common.errors import InvalidRequestError
from stagemesh.services.engines.diffusion import signature_of
from stagemesh.services.engines.diffusion.options import DiffusionOptions, ParallelOptions, stage_options


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
        ({"load": {"offload": "cloud"}}, "load.offload is 'cloud'"),
        ({"load": {"quantization": {"backend": "torchao"}, "offload": "disk"}}, "excludes load.offload disk"),
        ({"load": {"offload": "group"}, "enable_lora": True}, "enable_lora and parallel need a transformer"),
        ({"load": {"quick": True}}, "load.quick"),
        ({"load": {"custom_pipeline": "a:B"}}, r"only if, load\.format is custom_pipeline"),
        ({"step_cache": {"kind": "tea"}}, "kind"),
        ({"step_cache": {"kind": "mag", "max_skip_steps": 0}}, "max_skip_steps is 0: Input should be greater than 0"),
        (
            {"step_cache": {"kind": "first_block", "threshold": math.nan}},
            "threshold is nan: Input should be greater than or equal to 0",
        ),
        ({"step_cache": {"kind": "first_block", "limit": 1}}, "limit"),
        ({"part": "decode", "enable_lora": True}, "enable_lora is for stages that denoise; this stage has part decode"),
    ],
)
def test_invalid_options_are_rejected(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        stage_options(options)


def test_the_signature_states_adapter_support() -> None:
    signature = signature_of(DiffusionOptions(enable_lora=True))
    assert signature.adapters
    assert "adapter_scale" in signature.options
    assert not signature_of(DiffusionOptions()).adapters
