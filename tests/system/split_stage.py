"""A pipeline with a split stage and the same model in one stage, and the checks that both agree."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import grpc

from stagemesh.client import Client, Result, StageArguments, Tokens
from stagemesh.client.responses import ResultBuilder
from stagemesh.rpc.channels import CHANNEL_OPTIONS
from stagemesh.v1 import control_pb2, control_pb2_grpc
from tests.deployment import Deployment, eventually
from tests.engines.vllm.tiny_model import write_real_model
from tests.system.pipelines import pipeline_file

POSITIONS = 2048
KILLED_TOKENS = 300
"""The number of tokens of a request during which a replica is killed."""
PIPELINE = """\
pipeline: pair
main_stage: thinker
stages:
  thinker:
    engine: vllm
    model: {model}
    options: &options {{dtype: float32, kv_cache_memory_bytes: 33554432, checkpoint_tokens: 16}}
    split: {{prefill: {prefill}, decode: {decode}, min_tokens: 8, wait_s: {wait_s}}}
  whole: {{engine: vllm, model: {model}, options: *options}}
outputs:
  text: thinker
  tokens: thinker.token_ids
  whole-text: whole.text
  whole-tokens: whole.token_ids
"""


def write_pipeline(folder: Path, *, prefill: int = 1, decode: int = 1, wait_s: float = 20.0) -> Path:
    model = write_real_model(folder / "model", positions=POSITIONS, deviation=0.2)
    return pipeline_file(folder, PIPELINE.format(model=model, prefill=prefill, decode=decode, wait_s=wait_s))


def prompt(seed: int, length: int) -> list[int]:
    """Returns the token ids of a prompt that shares no block with that of another seed."""
    return [4 + (31 * seed + 7 * at * at + at * seed) % 250 for at in range(length)]


def generate(client: Client, arguments: Mapping[str, Any], sampling: StageArguments) -> Result:
    """Runs one request in the split stage and in the other one, with equal parameters."""
    return client.generate(**arguments, stages={"thinker": sampling, "whole": sampling}, seed=5).result()


def generate_with_kill(
    up: Deployment, client: Client, *, seed: int, victim: str, after: int, delay_s: float = 0.0
) -> Result:
    """Runs a request in both stages, and kills a replica when the stage has sampled more than `after` tokens.

    If `after` is negative, kills the replica `delay_s` seconds after the first event, which precedes all tokens.
    """
    sampling: StageArguments = {"temperature": 1.0, "max_tokens": KILLED_TOKENS, "ignore_eos": True, "logprobs": 0}
    running = client.generate(token_ids=prompt(seed, 1200), stages={"thinker": sampling, "whole": sampling}, seed=seed)
    builder, count, killed = ResultBuilder(), 0, False
    for event in running:
        builder.add(event)
        if isinstance(event, Tokens) and event.output == "tokens":
            count += len(event.ids)
        if not killed and count > after:
            time.sleep(delay_s)
            up.kill(victim)
            killed = True
    assert killed
    return builder.build()


def check_equal(result: Result) -> None:
    """Checks that both stages have sampled the same tokens and text, with the same probabilities."""
    assert result.tokens["tokens"] == result.tokens["whole-tokens"]
    assert result.texts.get("text", "") == result.texts.get("whole-text", "")
    pairs = zip(result.logprobs.get("tokens", ()), result.logprobs.get("whole-tokens", ()), strict=True)
    assert all(abs(ours.sampled.logprob - theirs.sampled.logprob) < 1e-3 for ours, theirs in pairs)


def check_no_blocks(up: Deployment, stages: Sequence[str] = ("thinker",)) -> None:
    """Waits until no replica of the split stage uses a block of its KV cache, and no step or arena is in use."""
    eventually(up.idle, timeout_s=20)
    for name in up.replicas():
        if name.startswith(tuple(stages)):
            eventually(lambda name=name: _has_no_blocks(up.statuses[name]["endpoint"]), timeout_s=20)  # type: ignore[misc]


def _has_no_blocks(endpoint: str) -> bool:
    """Clears the prefix cache of a replica, which fails as long as a block is in use."""
    with grpc.insecure_channel(endpoint, options=CHANNEL_OPTIONS) as channel:
        stub = control_pb2_grpc.StageControlServiceStub(channel)
        try:
            stub.ClearCaches(control_pb2.ClearCachesRequest(), timeout=10, wait_for_ready=True)
        except grpc.RpcError as exc:
            if exc.code() is not grpc.StatusCode.FAILED_PRECONDITION:
                raise
            return False
    return True
