"""A deployment of the tiny Qwen3-Omni, all of whose outputs can be compared with transformers."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.models.qwen3_omni.reference import TORCHVISION

PIPELINE = """\
pipeline: omni
main_stage: thinker
stages:
  thinker:
    engine: vllm
    model: {model}
    options:
      dtype: float32
      max_model_len: 2048
      max_num_batched_tokens: 64
      kv_cache_memory_bytes: 16777216
      mm_processor_kwargs: {{fps: 2.0}}
      hidden_states: {{layers: [accept], positions: true, prompt_only: true, dtype: float32}}
  talker:
    engine: vllm
    model: {model}
    options:
      dtype: float32
      max_model_len: 2048
      max_num_batched_tokens: 64
      kv_cache_memory_bytes: 16777216
      codec: {{model: qwen3_omni.talker, dtype: float32}}
  code2wav:
    engine: function
    function: qwen3_omni.code2wav
    model: {model}
edges:
  - {{from: thinker, to: talker, transform: qwen3_omni.thinker2talker}}
  - {{from: talker, to: code2wav, transform: qwen3_omni.talker2code2wav, chunk: {{frames: 8, initial_frames: 3}}}}
outputs: {{text: thinker, tokens: thinker.token_ids, codes: talker.codes, audio: code2wav}}
"""


@contextmanager
def with_torchvision() -> Iterator[None]:
    """Lets processes that start meanwhile import torchvision, which vLLM's thinker needs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(TORCHVISION), os.environ.get("PYTHONPATH")])))
        yield
