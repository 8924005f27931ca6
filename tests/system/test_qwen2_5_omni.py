"""A deployed tiny Qwen2.5-Omni, compared with transformers: the same text, the same codes and the same waveform."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from stagemesh.client import Client, Message, Result, StageArguments
from tests.deployment import Deployment, deployed
from tests.models.qwen2_5_omni.reference import SEED
from tests.models.qwen3_omni import deployment, reference
from tests.system.pipelines import pipeline_file
from tests.system.test_qwen3_omni import Case, cases, check_begin

pytestmark = pytest.mark.timeout(400)

TEXT_TOKENS, CODEC_TOKENS = 12, 24
PIPELINE = (
    deployment.PIPELINE.replace("qwen3_omni", "qwen2_5_omni")
    .replace("code2wav", "token2wav")
    .replace("[accept], positions: true, prompt_only: true", "[last], positions: true")
    .replace("max_model_len: 1024", "max_model_len: 2048")
    .replace("edges:", "    options: {{look_ahead_blocks: 4}}\nedges:")
)


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
    with deployment.with_torchvision(), deployed(file) as up:
        yield up


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
