"""The vocoder of transformers that tests of code2wav compare with."""

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.engines.torch_threads import one_torch_thread

if TYPE_CHECKING:
    from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeCode2Wav

__all__ = ["one_torch_thread"]


@pytest.fixture(scope="session")
def code2wav_reference() -> "Qwen3OmniMoeCode2Wav":
    """A tiny code2wav of transformers, which all tests of a process share. They must not change it."""
    from tests.models.tiny_code2wav import make_reference

    return make_reference()


@pytest.fixture(scope="session")
def code2wav_folder(code2wav_reference: "Qwen3OmniMoeCode2Wav", tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of its checkpoint, which all tests of a process share. They must not write to it."""
    from tests.models.tiny_code2wav import write_checkpoint

    return write_checkpoint(tmp_path_factory.mktemp("code2wav"), code2wav_reference)
