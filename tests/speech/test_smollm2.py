"""The speech pipeline's thinker alone: its greedy text equals that of transformers."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from stagemesh.common.process.settings import find_model
from tests.deployment import Deployment, deployed_for_module, metric_value
from tests.system.pipelines import pipeline_file

pytestmark = [pytest.mark.speech, pytest.mark.timeout(300)]

NAME = "smollm2-135m-instruct"
PIPELINE = f"""\
pipeline: writing
stages:
  thinker:
    engine: vllm
    model: {NAME}
    options: {{dtype: float32, max_model_len: 512, kv_cache_memory_bytes: 268435456}}
outputs: {{text: thinker, said: thinker.token_ids}}
"""
PROMPTS = (
    "Why is the sea salty?",
    "Describe a walk in the forest.",
    "What is a bicycle?",
    "Name three rivers in Europe.",
    "Write a line about the moon.",
    "How do I boil an egg?",
    "What is seven times eight?",
    "Tell me a short joke.",
    "Translate 'good morning' into French.",
    "Who wrote Hamlet?",
)
MAX_TOKENS = 32
TIE = 1e-3
"""The largest difference of logits whose order may depend on the order of a sum."""


writing = deployed_for_module(lambda folder: pipeline_file(folder, PIPELINE), "--metrics")


def test_ten_prompts_get_the_text_that_transformers_gives(writing: Deployment) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = _model_folder()
    with writing.client() as client, ThreadPoolExecutor(len(PROMPTS)) as pool:
        ask = partial(client.generate, temperature=0.0, max_tokens=MAX_TOKENS, seed=1)
        results = list(pool.map(lambda prompt: ask(prompt).result(), PROMPTS))
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for prompt, result in zip(PROMPTS, results, strict=True):
        said = list(result.tokens["said"])
        assert result.text == tokenizer.decode(said, skip_special_tokens=True)
        ids = tokenizer.apply_chat_template([{"role": "user", "content": prompt}], add_generation_prompt=True)
        assert said
        assert _largest_gap(model, list(ids["input_ids"]), said) <= TIE, prompt


def _largest_gap(model: Any, prompt: list[int], said: list[int]) -> float:
    """Returns the largest difference between the best logit and a sampled token's; 0 if all tokens are greedy."""
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + said])).logits[0, len(prompt) - 1 : -1]
    gaps = logits.max(dim=-1).values - logits[torch.arange(len(said)), said]
    return float(gaps.max())


def _model_folder() -> Path:
    folder = find_model(NAME)
    assert folder is not None, "`make models` fetches it"
    return folder


def test_the_metrics_of_vllm_count_the_tokens_of_clients(writing: Deployment) -> None:
    labels = {"stage": "thinker", "replica": "thinker-0"}
    name = "vllm:generation_tokens_total"
    before = metric_value(writing.scrape("thinker-0"), name, **labels)
    with writing.client() as client:
        result = client.generate(PROMPTS[0], max_tokens=MAX_TOKENS, seed=1).result()
    metrics = writing.scrape("thinker-0")
    assert metric_value(metrics, name, **labels) - before == result.finished.stages["thinker"].usage.output_tokens
    assert metric_value(metrics, "vllm:time_to_first_token_seconds_count", **labels) >= 1
