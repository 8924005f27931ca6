"""guidellm: benchmarks of chat completions, completions and responses, with synthetic prompts."""

import json
import os
import subprocess
import sys
from pathlib import Path

from features import run_features
from tokenizer import write_tokenizer

URL = os.environ["OPENAI_BASE_URL"].removesuffix("/v1")


def benchmarks(**backend):
    options = {
        "backend": {"kind": "openai_http", "target": URL, "model": "omni", **backend},
        "profile": {"kind": "concurrent", "streams": 2},
        "constraint": {"kind": "max_requests", "count": 4},
        "tokenizer": {"kind": "huggingface_auto", "model": write_tokenizer()},
        "data": {"kind": "synthetic_text", "prompt_tokens": 16, "output_tokens": 8},
        "output": {"kind": "json", "path": "result.json"},
    }
    given = [part for name, each in options.items() for part in (f"--{name}", _settings(each))]
    program = Path(sys.executable).with_name("guidellm")
    subprocess.run([program, "run", "--disable-console-interactive", *given], check=True, stdout=sys.stderr)
    (made,) = json.loads(Path("result.json").read_text())["benchmarks"]
    requests = made["requests"]
    assert (len(requests["successful"]), len(requests["errored"])) == (4, 0), requests["errored"][:1]
    assert [each["output_metrics"]["text_tokens"] for each in requests["successful"]] == [8] * 4
    assert all(each["time_to_first_token_ms"] > 0 for each in requests["successful"])


def _settings(values):
    return ",".join(f"{name}={value}" for name, value in values.items())


def chat():
    benchmarks()


def completions():
    benchmarks(request_format="/v1/completions")


def responses():
    benchmarks(request_format="/v1/responses")


run_features(chat, completions, responses)
