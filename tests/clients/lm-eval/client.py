"""lm-eval: a task of generation and one of log-likelihoods, on completions with token ids and on chat."""

import json
import os
from pathlib import Path

import lm_eval
from features import run_features
from lm_eval.tasks import TaskManager
from tokenizer import write_tokenizer

TASK = """\
task: {0}
dataset_path: json
dataset_kwargs: {{data_files: {{test: questions.jsonl}}}}
test_split: test
output_type: {0}
doc_to_text: "{{{{question}}}}"
doc_to_target: "w3"
{1}
"""
CHOICES = 'doc_to_choice: ["w3", "w4"]\nmetric_list: [{metric: acc}]'
GENERATES = 'generation_kwargs: {max_gen_toks: 4, until: ["w9"]}\nmetric_list: [{metric: exact_match}]'
URL = os.environ["OPENAI_BASE_URL"]


def evaluates(kind, endpoint, task, **settings):
    rows = [json.dumps({"question": f"w5 w6 w{number}"}) for number in range(10, 13)]
    Path("questions.jsonl").write_text("\n".join(rows))
    tasks = Path("tasks")
    tasks.mkdir(exist_ok=True)
    for name, rest in (("generate_until", GENERATES), ("multiple_choice", CHOICES)):
        (tasks / f"{name}.yaml").write_text(TASK.format(name, rest))
    model = {"model": "omni", "base_url": f"{URL}/{endpoint}", "tokenizer": write_tokenizer(), "max_retries": 1}
    manager = TaskManager(include_path=str(tasks.resolve()), include_defaults=False)
    found = lm_eval.simple_evaluate(kind, model, tasks=[task], task_manager=manager, bootstrap_iters=0, **settings)
    assert len(found["samples"][task]) == 3


def generation():
    evaluates("local-completions", "completions", "generate_until")


def chat_generation():
    evaluates("local-chat-completions", "chat/completions", "generate_until", apply_chat_template=True)


def log_likelihoods():
    evaluates("local-completions", "completions", "multiple_choice")


run_features(generation, chat_generation, log_likelihoods)
