"""The results of transformers' implementation of Qwen3-Omni on a checkpoint: greedy, float32, one request at a time.

`run` computes them in a process of its own, which can import torchvision: the processors of images and video need it.
The process of the tests must not import it, because transformers would then use it everywhere.
"""

import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from stagemesh.verification.qwen3_omni import Conversation, Reference, Result
from tests.repository.commands import ROOT

__all__ = ["SOUND_HZ", "TORCHVISION", "Conversation", "Reference", "Result", "run"]

TORCHVISION = Path(sys.prefix) / "torchvision"
"""The folder into which `make venv` installs torchvision, apart from the other packages."""
SOUND_HZ = 16000


def run(
    folder: Path, conversations: Sequence[Conversation], *, text_tokens: int, codec_tokens: int, module: str = __name__
) -> list[Result]:
    """Computes the results of `conversations` in a process that can import torchvision. Takes seconds.

    `module` is the name of the module whose `main` the process runs.
    """
    command = [sys.executable, "-m", module]
    path = os.pathsep.join(filter(None, [str(ROOT), str(TORCHVISION), os.environ.get("PYTHONPATH")]))
    arguments = pickle.dumps((folder, conversations, text_tokens, codec_tokens))
    ran = subprocess.run(
        command, input=arguments, capture_output=True, check=False, cwd=ROOT, env={**os.environ, "PYTHONPATH": path}
    )
    assert ran.returncode == 0, ran.stderr.decode()
    results: list[Result] = pickle.loads(ran.stdout)  # noqa: S301 - of the process that was started here
    return results


def main(kind: Callable[[Path], Any]) -> None:
    """Reads the arguments of `run` from stdin, and writes its results to stdout. `kind` is the reference's class."""
    from stagemesh.services.engines.torch_setup import declare_operators

    folder, conversations, text_tokens, codec_tokens = pickle.load(sys.stdin.buffer)  # noqa: S301 - see `run`
    declare_operators()
    reference = kind(folder)
    results = [reference.generate(each, text_tokens=text_tokens, codec_tokens=codec_tokens) for each in conversations]
    sys.stdout.buffer.write(pickle.dumps(results))


if __name__ == "__main__":
    main(Reference)
