"""A deployed tiny Qwen2.5-Omni, compared with transformers: the same text, the same codes and the same waveform."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from stagemesh.client import Client, Message, Result, StageArguments
from tests.deployment import Deployment, deployed
from tests.models.qwen2_5_omni.reference import SEED
from tests.models.qwen3_omni import reference
from tests.models.qwen3_omni.deployment import with_torchvision
from tests.system.pipelines import pipeline_file
from tests.system.test_qwen3_omni import Case, cases, check_begin

pytestmark = pytest.mark.timeout(400)

TEXT_TOKENS, CODEC_TOKENS = 12, 24
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
      hidden_states: {{layers: [last], positions: true, dtype: float32}}
  talker:
    engine: vllm
    model: {model}
    options:
      dtype: float32
      max_model_len: 2048
      max_num_batched_tokens: 64
      kv_cache_memory_bytes: 16777216
      codec: {{model: qwen2_5_omni.talker, dtype: float32}}
  token2wav:
    engine: function
    function: qwen2_5_omni.token2wav
    model: {model}
    options: {{look_ahead_blocks: 4}}
edges:
  - {{from: thinker, to: talker, transform: qwen2_5_omni.thinker2talker}}
  - {{from: talker, to: token2wav, transform: qwen2_5_omni.talker2token2wav, chunk: {{frames: 8, initial_frames: 3}}}}
outputs: {{text: thinker, tokens: thinker.token_ids, codes: talker.codes, audio: token2wav}}
"""


@pytest.fixture(scope="module")
def expected(tiny_qwen2_5_omni: Path) -> Sequence[reference.Result]:
    return reference.run(
        tiny_qwen2_5_omni,
        [each.expected for each in cases()],
        text_tokens=TEXT_TOKENS,
        codec_tokens=CODEC_TOKENS,
        module="tests.models.qwen2_5_omni.reference",
    )


@pytest.fixture(scope="module")
def omni(tiny_qwen2_5_omni: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    file = pipeline_file(tmp_path_factory.mktemp("omni"), PIPELINE.format(model=tiny_qwen2_5_omni))
    with with_torchvision(), deployed(file) as deployment:
        yield deployment


def generate(client: Client, each: Case) -> Result:
    thinker: StageArguments = {"temperature": 0.0, "max_tokens": TEXT_TOKENS}
    talker: StageArguments = {"temperature": 0.0, "max_tokens": CODEC_TOKENS}
    stages, options = {"thinker": thinker, "talker": talker}, {"speaker": each.expected.speaker}
    messages = [Message("user", each.content)]
    return client.generate(messages=messages, seed=SEED, stages=stages, options=options).result()


def check(result: Result, expected: reference.Result) -> None:
    check_begin(result, expected)
    assert result.audio.shape == expected.waveform.shape


@pytest.mark.parametrize("number", range(len(cases())), ids=[each.name for each in cases()])
def test_a_request_equals_transformers(omni: Deployment, expected: Sequence[reference.Result], number: int) -> None:
    with omni.client() as client:
        check(generate(client, cases()[number]), expected[number])


def test_eight_requests_at_once_equal_transformers(omni: Deployment, expected: Sequence[reference.Result]) -> None:
    numbers = [*range(len(expected)), 0][:8]
    with omni.client() as client, ThreadPoolExecutor(len(numbers)) as pool:
        results = list(pool.map(lambda number: generate(client, cases()[number]), numbers))
    for number, result in zip(numbers, results, strict=True):
        check(result, expected[number])
