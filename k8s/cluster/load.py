"""Sends requests until SIGTERM, and writes one JSON line for each: its times, the digest of its outputs, and its error.

Usage: python -m k8s.cluster.load ADDRESS FILE CLIENTS [CERTIFICATE]
Each client sends one request after another, of a few prompts in turn. The same prompt and seed give the same bytes.
"""

import asyncio
import contextlib
import hashlib
import itertools
import json
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO

from stagemesh.client import AsyncClient, Audio, ClientOptions
from stagemesh.common.errors import StagemeshError

PROMPTS = (
    "Name three colours of the sea.",
    "Say in one sentence why the sky is blue.",
    "Count from one to five in words.",
    "Which animal barks?",
)
_SEED = 7
_MAX_TOKENS = 24
_TIMEOUT_S = 240.0


async def send(client: AsyncClient, prompt: str) -> dict[str, object]:
    """Sends one request. Returns its line: `digest` is None and `error` is set if it failed."""
    begun_s = time.time()
    line: dict[str, object] = {"begun_s": begun_s, "prompt": prompt, "digest": None, "error": None}
    try:
        result = await client.generate(prompt, seed=_SEED, max_tokens=_MAX_TOKENS, timeout_s=_TIMEOUT_S).result()
        line |= {"digest": _digest(result.texts, result.audios), "first_audio_s": result.first_audio_s}
    except StagemeshError as exc:
        line["error"] = f"{type(exc).__name__}: {exc}"
    return {**line, "ended_s": time.time()}


def _digest(texts: Mapping[str, str], audios: Mapping[str, Audio]) -> str:
    content = hashlib.sha256(json.dumps(dict(texts), sort_keys=True).encode())
    for name in sorted(audios):
        content.update(audios[name].samples.tobytes())
    return content.hexdigest()[:16]


async def _run_client(
    address: str, prompts: Iterator[str], file: IO[str], stopping: asyncio.Event, certificate: str | None
) -> None:
    options: ClientOptions = {} if certificate is None else {"tls": certificate}
    async with AsyncClient(address, **options) as client:
        while not stopping.is_set():
            file.write(json.dumps(await send(client, next(prompts))) + "\n")
            file.flush()


async def main(address: str, path: Path, clients: int, certificate: str | None = None) -> None:
    """Runs the clients until SIGTERM. Requests that are running then are finished."""
    stopping = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopping.set)
    with path.open("a") as file:
        async with asyncio.TaskGroup() as group:
            for number in range(clients):
                prompts = itertools.islice(itertools.cycle(PROMPTS), number, None)
                group.create_task(_run_client(address, prompts, file, stopping, certificate))


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:5]))
