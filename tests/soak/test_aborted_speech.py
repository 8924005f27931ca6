"""A tiny Qwen3-Omni under many requests, a third of which are aborted at random moments: in 500, no process grows."""

import random
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import psutil
import pytest

from stagemesh.client import AudioSamples, Client, Content, ImageFile, StageArguments
from stagemesh.common.errors import CancelledRequestError, NotFoundError
from tests.deployment import Deployment, deployed, eventually
from tests.engines.vllm.media_files import encoded, pixels, tone
from tests.models.qwen3_omni.deployment import PIPELINE, with_torchvision
from tests.soak.operators import operating

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3600)]

WARM, REQUESTS, AT_ONCE = 400, 900, 4
"""The first requests touch all pages of caches for the first time, and libraries prepare a kernel for each shape."""
MOST_EVENTS = 24
"""An aborted request ends after at most this number of events. A whole request has about 30."""
KEPT_S = 31.0
"""Seconds after which the orchestrator has dropped the outputs of ended requests, which it keeps for 30 s."""
GROWTH, GROWTH_MB = 0.02, 4.0
"""A process may grow by this fraction of its resident memory, and by this number of megabytes in addition."""
IMAGE, SOUND = ImageFile(encoded(pixels(64, 64)), "image/png"), AudioSamples(tone(0.5), 16_000)


async def test_aborted_requests_leave_neither_memory_nor_steps(tiny_qwen3_omni: Path, tmp_path: Path) -> None:
    file = tmp_path / "omni.yaml"
    file.write_text(PIPELINE.format(model=tiny_qwen3_omni))
    with with_torchvision(), deployed(file, ready_s=400) as omni:
        aborted = run_requests(omni, range(WARM))
        warm = resident_mb(omni)
        aborted += run_requests(omni, range(WARM, REQUESTS))
        later = resident_mb(omni)
        async with operating(omni.admin_endpoint) as operator:
            assert await operator.running() == []
    print(f"{aborted} of {REQUESTS} requests were aborted")
    for name, size_mb in later.items():
        print(f"{name}: {warm[name]:.1f} MB after {WARM} requests, {size_mb:.1f} MB after {REQUESTS}")
    assert aborted > REQUESTS / 4
    assert later.keys() == warm.keys()
    grown = {name for name in later if later[name] > warm[name] * (1 + GROWTH) + GROWTH_MB}
    assert not grown


def run_requests(omni: Deployment, numbers: range) -> int:
    """Runs requests, several at once, and returns the number of aborted requests.

    After every 50 requests, no stage may have a step or use memory of its arena.
    """
    aborted = 0
    with omni.client() as client, ThreadPoolExecutor(AT_ONCE) as pool:
        for start in range(numbers.start, numbers.stop, 50):
            aborted += sum(pool.map(partial(run_request, client), range(start, start + 50)))
            eventually(omni.idle, timeout_s=30)
    return aborted


def run_request(client: Client, number: int) -> bool:
    """Runs a request, and returns whether it was aborted.

    Every third one is aborted after a random number of events: it is cancelled, or its caller disconnects.
    """
    chance = random.Random(number)
    content: list[Content] = ["Speak to me", [IMAGE, "What is it?"], [SOUND, "What is it?"]]
    frames = chance.randrange(8, 96)
    stages: Mapping[str, StageArguments] = {
        "thinker": {"max_tokens": 16, "min_tokens": 16},
        "talker": {"max_tokens": frames, "min_tokens": frames},
    }
    request_id = f"soak-{number}"
    events = iter(client.generate(chance.choice(content), seed=number, stages=stages, request_id=request_id))
    last = chance.randrange(MOST_EVENTS) if number % 3 == 0 else None
    try:
        for count, _ in enumerate(events):
            if count == last and number % 2:
                events.close()
                return True
            if count == last:
                client.cancel(request_id)
    except CancelledRequestError:
        return True
    except NotFoundError:
        # The request ended before the cancellation arrived.
        return False
    return False


def resident_mb(omni: Deployment) -> dict[str, float]:
    """Returns the resident memory of each process of the deployment, in megabytes, by the name of its replica.

    The child processes of a replica, such as vLLM's engine core, have their numbers behind the name.
    """
    time.sleep(KEPT_S)
    sizes = dict[str, float]()
    for name, status in omni.statuses.items():
        process = psutil.Process(status["process_id"])
        children = sorted(process.children(recursive=True), key=lambda each: each.create_time())
        for number, each in enumerate([process, *children]):
            sizes[f"{name} {number}"] = each.memory_info().rss / (1 << 20)
    return sizes
