"""Two language models in separate services. The second one gets the hidden states of the first while the first still
samples.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from stagemesh.client import Result, StageArguments
from tests.deployment import deployed, eventually
from tests.engines.vllm.tiny_model import write_real_model
from tests.system.added_transforms import RENAMED, add_transform
from tests.system.pipelines import pipeline_file

pytestmark = pytest.mark.timeout(300)

STEPS = 12
PROMPTS = [[20 + (7 * number + at) % 200 for at in range(3 + 20 * number)] for number in range(4)]
PIPELINE = """\
pipeline: pair
main_stage: thinker
stages:
  thinker:
    engine: vllm
    model: {model}
    options: {{dtype: float32, kv_cache_memory_bytes: 8388608, hidden_states: {{dtype: float32}}}}
  talker:
    engine: vllm
    model: {model}
    options: {{dtype: float32, kv_cache_memory_bytes: 8388608, embeddings: {{dtype: float32}}}}
edges:
  - {{from: thinker, to: talker, transform: renamed}}
outputs: {{thought: thinker.token_ids, text: thinker.text, said: talker.token_ids}}
"""


def test_the_talker_outputs_what_transformers_computes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_transform(tmp_path, monkeypatch, name="renamed", source=RENAMED)
    model = write_real_model(tmp_path / "model")
    file = pipeline_file(tmp_path, PIPELINE.format(model=model))
    with deployed(file) as up, up.client() as client, ThreadPoolExecutor(4) as pool:

        def generate(prompt: Sequence[int]) -> Result:
            greedy: StageArguments = {"temperature": 0.0, "max_tokens": STEPS, "logprobs": 1}
            stages = {"thinker": greedy, "talker": greedy}
            return client.generate(token_ids=prompt, seed=1, stages=stages).result()

        results = list(pool.map(generate, PROMPTS))
        eventually(up.idle, timeout_s=10)
    assert [(result.tokens["thought"], result.tokens["said"]) for result in results] == _expected(model)
    for result in results:
        _check_logprobs(result)
    assert any("text" in result.logprobs for result in results)


def _check_logprobs(result: Result) -> None:
    """The text has the log-probabilities of the tokens that begin in it."""
    assert [each.sampled.id for each in result.logprobs["thought"]] == list(result.tokens["thought"])
    assert [each.sampled.id for each in result.logprobs["said"]] == list(result.tokens["said"])
    length = len(result.texts.get("text", "").encode())
    in_text = [each for each in result.logprobs["thought"] if each.position < length]
    assert list(result.logprobs.get("text", ())) == in_text


def _expected(folder: Path) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        return [_thought_and_said(model, prompt) for prompt in PROMPTS]


def _thought_and_said(model: Any, prompt: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    embed = model.get_input_embeddings()
    ids = list(prompt)
    while len(ids) < len(prompt) + STEPS:
        thought = model(torch.tensor([ids]), output_hidden_states=True)
        ids.append(int(thought.logits[0, -1].argmax()))
    states = thought.hidden_states[-1][0]
    inputs, said = states[: len(prompt)], list[int]()
    while len(said) < STEPS:
        said.append(int(model(inputs_embeds=inputs[None]).logits[0, -1].argmax()))
        added = states[len(inputs)] if len(inputs) < len(states) else 0
        inputs = torch.cat([inputs, embed(torch.tensor([said[-1]])) + added])
    return tuple(ids[len(prompt) :]), tuple(said)
