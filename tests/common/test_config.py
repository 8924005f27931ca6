"""Tests of the config files of all service processes."""

import dataclasses
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stagemesh.common.errors import InvalidRequestError
from stagemesh.common.process.config import ProcessConfig, load_config
from stagemesh.common.process.media_config import MediaServiceConfig
from stagemesh.common.process.stage_process import StageConfig
from stagemesh.gateway.config import GatewayConfig
from stagemesh.jobs.config import JobServerConfig
from stagemesh.orchestrator.config import OrchestratorConfig
from tests.rpc.call_errors import raises

CONFIGS = (GatewayConfig, JobServerConfig, MediaServiceConfig, OrchestratorConfig, StageConfig)


def sections(kind: Any) -> Iterator[Any]:
    """Yields the dataclasses of a config and of all its sections."""
    if dataclasses.is_dataclass(kind):
        yield kind
        for hint in typing.get_type_hints(kind).values():
            yield from sections(hint)
    for argument in typing.get_args(kind):
        yield from sections(argument)


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_misspelled_key_is_named_with_the_right_one(kind: type[ProcessConfig], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"parent_pidd": 1}')
    with raises(InvalidRequestError, reason="INVALID_CONFIG", match="parent_pidd.*did you mean 'parent_pid'"):
        load_config(kind, tmp_path / "config.json")


@pytest.mark.parametrize("section", sorted({each for kind in CONFIGS for each in sections(kind)}, key=repr))
def test_no_section_ignores_an_unknown_key(section: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"mistaken": 1}')
    with raises(InvalidRequestError, reason="INVALID_CONFIG", match="mistaken"):
        load_config(section, tmp_path / "config.json")
