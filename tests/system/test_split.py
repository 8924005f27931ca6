"""A vllm stage that is split into prefill and decode replicas, compared with the same model in one stage."""

import random
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import pytest

from stagemesh.client import StageArguments
from stagemesh.common.errors import InvalidRequestError
from tests.deployment import Deployment
from tests.system.split_stage import KILLED_TOKENS, check_equal, check_no_blocks, generate, generate_with_kill, prompt

pytestmark = pytest.mark.timeout(600)

STEPS = 24
GREEDY: StageArguments = {"temperature": 0.0, "max_tokens": STEPS, "ignore_eos": True, "logprobs": 1}
SEEDED: StageArguments = {**GREEDY, "temperature": 1.0, "top_p": 0.9, "repetition_penalty": 1.1}
CASES: Mapping[str, tuple[Mapping[str, Any], StageArguments]] = {
    "greedy": ({"token_ids": prompt(1, 700)}, GREEDY),
    "seeded": ({"token_ids": prompt(2, 700)}, SEEDED),
    "one block": ({"token_ids": prompt(3, 128)}, SEEDED),
    "too short": ({"token_ids": prompt(4, 7)}, GREEDY),
    "stop text": ({"token_ids": prompt(5, 300)}, {**SEEDED, "stop": ["e", "a"]}),
    "chat template": ({"messages": [("user", "Tell a story " * 20)]}, SEEDED),
    "structure": ({"token_ids": prompt(6, 300)}, {"max_tokens": STEPS, "regex": "[ab]{9}", "logprobs": 1}),
}


@pytest.mark.parametrize(("arguments", "sampling"), CASES.values(), ids=CASES.keys())
def test_tokens_equal_those_of_one_stage(
    split_up: Deployment, arguments: Mapping[str, Any], sampling: StageArguments
) -> None:
    with split_up.client() as client:
        check_equal(generate(client, arguments, sampling))
    check_no_blocks(split_up)


def test_concurrent_requests_keep_their_tokens(split_up: Deployment) -> None:
    with split_up.client() as client, ThreadPoolExecutor(12) as pool:
        requests = [{"token_ids": prompt(seed, 40 * seed)} for seed in range(10, 34)]
        for result in pool.map(lambda each: generate(client, each, SEEDED), requests):
            check_equal(result)
    check_no_blocks(split_up)


def test_reports_name_both_stages(split_up: Deployment) -> None:
    with split_up.client() as client:
        result = client.generate(token_ids=prompt(40, 400), outputs=["tokens"], max_tokens=5).result()
        described = client.describe()
    prefill, decode = result.finished.usage["thinker-prefill"], result.finished.usage["thinker"]
    assert (prefill.prompt_tokens, prefill.output_tokens) == (400, 0)
    assert (decode.prompt_tokens, decode.output_tokens) == (400, len(result.tokens["tokens"]))
    assert [stage.name for stage in described.stages] == ["thinker-prefill", "thinker", "whole"]
    assert [(edge.from_stage, edge.to_stage) for edge in described.edges] == [("thinker-prefill", "thinker")]


def test_cancelled_requests_leave_no_blocks(split_up: Deployment) -> None:
    with split_up.client() as client:
        for number in range(6):
            running = client.generate(
                token_ids=prompt(50 + number, 1500), outputs=["tokens"], max_tokens=400, ignore_eos=True
            )
            # Without a caller, the request is stopped.
            with closing(iter(running)) as events:
                for _ in range(number + 1):
                    next(events)
    check_no_blocks(split_up)


def test_error_of_a_request_is_that_of_one_stage(split_up: Deployment) -> None:
    with split_up.client() as client, pytest.raises(InvalidRequestError, match="maximum context length is 2048 tokens"):
        client.generate(token_ids=prompt(60, 2048), outputs=["tokens"], max_tokens=100).result()
    check_no_blocks(split_up)


@pytest.mark.parametrize("kills", [2, pytest.param(50, marks=[pytest.mark.soak, pytest.mark.timeout(7200)])])
def test_no_request_fails_if_either_side_is_killed(split_up: Deployment, kills: int) -> None:
    moments = random.Random(kills)
    with split_up.client() as client:
        for number in range(kills):
            split_up.wait(Deployment.all_ready, timeout_s=400)
            victim = ("thinker-prefill-0", "thinker-0")[number % 2]
            # Half of the moments are before the first token.
            after = -1 if number % 4 in {0, 3} else moments.randrange(KILLED_TOKENS - 50)
            delay_s = moments.uniform(0.0, 0.3) if after < 0 else 0.0
            result = generate_with_kill(split_up, client, seed=70 + number, victim=victim, after=after, delay_s=delay_s)
            check_equal(result)
    split_up.wait(Deployment.all_ready, timeout_s=400)
    check_no_blocks(split_up)
