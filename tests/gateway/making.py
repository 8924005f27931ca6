"""A pipeline with a function that makes text, audio and images of a prompt, and a gateway in a process of its own."""

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import httpx2
import openai
import pytest
import websockets
from websockets.http11 import Response

from stagemesh.cli.launcher.ports import PortPicker
from stagemesh.common.process.config import TokenConfig
from stagemesh.gateway import service
from stagemesh.gateway.config import GatewayConfig
from stagemesh.gateway.limits import Limits
from stagemesh.gateway.service import create_app, serve
from stagemesh.rpc.authentication import TokenChecker, TokenEntry, add_token
from stagemesh.rpc.credentials import CA
from stagemesh.v1.orchestrator_pb2 import DescribePipelineResponse, OutputDescription, StageDescription
from stagemesh.v1.signature_pb2 import Signature, TensorKind
from tests.client.scripted import ScriptedOrchestrator, served
from tests.credentials import issue, process_credentials
from tests.deployment import Deployment, deployed
from tests.system.added_transforms import add_function
from tests.system.pipelines import pipeline_file

RATE_HZ = 16_000
REALTIME = "/v1/realtime?model=p"
MAKER = f"""\
import io
import time

import numpy as np
from PIL import Image
from stagemesh.common.plugins.descriptors import Emitted, FunctionDescriptor, OptionSpec, Signature
from stagemesh.common.wire.tensors import TensorSpec
from stagemesh.connectors.packets import Packet

_BYTES = TensorSpec.parse("uint8[bytes]")
DESCRIPTOR = FunctionDescriptor(
    Signature(
        emits={{
            "text": Emitted(_BYTES, kind="text"),
            "audio": Emitted(TensorSpec.parse("float32[samples]"), kind="audio", sample_rate_hz={RATE_HZ}),
            "image": Emitted(_BYTES, kind="image"),
        }},
        options={{
            "speaker": OptionSpec("alto", allowed_texts=("alto", "bass")),
            "speed": OptionSpec(1.0, minimum=0.25, maximum=4.0),
            "width": OptionSpec(8, minimum=1, maximum=64),
            "height": OptionSpec(8, minimum=1, maximum=64),
        }},
        media=True,
    ),
    "added_maker:Maker",
)


class Maker:
    def __init__(self, model, options):
        pass

    def open(self, *, seed, options):
        return options

    def __call__(self, batch):
        return [self._made(call) if call.packet else [] for call in batch]

    def _made(self, call):
        text = call.packet.tensors["text"].tobytes().decode()
        if "fail" in text:
            raise LookupError("no such word")
        text = " ".join([text, *(each.kind for each in call.media)])
        if "sleep" in text:
            time.sleep(20)
        words = [f"{{call.state['speaker']}}:", *text.split(" ")]
        buffer = io.BytesIO()
        colour = (200, 0, 100 * len(call.media))
        Image.new("RGB", (int(call.state["width"]), int(call.state["height"])), colour).save(buffer, "PNG")
        packets = [Packet({{"text": np.frombuffer((word + " ").encode(), np.uint8)}}) for word in words]
        tone = np.sin(np.arange({RATE_HZ} // 10) / 20).astype(np.float32)
        packets += [Packet({{"audio": tone / call.state["speed"]}})] * (0 if "…" in text else 2)
        return [*packets, Packet({{"image": np.frombuffer(buffer.getvalue(), np.uint8)}})]
"""
PIPELINE = """
pipeline: maker
stages:
  maker: {engine: function, function: maker, options: {max_batch: 1}}
outputs: {text: maker.text, audio: maker.audio, image: maker.image}
"""


@contextmanager
def making(folder: Path, *arguments: str) -> Iterator[Deployment]:
    """Runs the pipeline. Registers its function for the processes that start within the block."""
    with pytest.MonkeyPatch.context() as patch:
        add_function(folder, patch, name="maker", source=MAKER)
        with deployed(pipeline_file(folder, PIPELINE), *arguments) as up:
            yield up


@contextmanager
def gateway(*servers: str, arguments: Sequence[str] = ()) -> Iterator[str]:
    """Runs `stagemesh gateway`. Yields its URL when it serves, and asserts that it exits with status 0."""
    listen = f"127.0.0.1:{PortPicker().pick()}"
    named = [part for server in servers for part in ("--server", server)]
    with configured_gateway("--listen", listen, *named, *arguments, url=f"http://{listen}") as url:
        yield url


@contextmanager
def configured_gateway(*arguments: str, url: str) -> Iterator[str]:
    """Runs `stagemesh gateway` with these arguments, by which it serves at `url`."""
    command = [str(Path(sys.executable).with_name("stagemesh")), "gateway", *arguments]
    with subprocess.Popen(command) as process:
        try:
            wait_until_healthy(url, process)
            yield url
        finally:
            process.terminate()
        assert process.wait(timeout=30) == 0


def wait_until_healthy(url: str, process: "subprocess.Popen[bytes]", *, timeout_s: float = 30.0) -> None:
    """Waits until a gateway answers. Fails if its process ends."""
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        assert process.poll() is None, "the gateway ended"
        try:
            httpx.get(f"{url}/health").raise_for_status()
        except httpx.TransportError:
            time.sleep(0.05)
        else:
            return
    raise TimeoutError(f"{url} does not answer")


def client(url: str, key: str = "none") -> openai.OpenAI:
    """Returns the official client. It does not retry, so that a test sees each error."""
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=30)


async def ask(ai: openai.AsyncOpenAI, **arguments: Any) -> Any:
    """Sends "hello", or the given `messages`, to the model "p". Returns its answer."""
    create: Any = ai.chat.completions.create
    return await create(**{"model": "p", "messages": [{"role": "user", "content": "hello"}], **arguments})


def error_of(answer: Any, status: int = 400) -> Any:
    """Returns the error of a response, which must have this status."""
    assert answer.status_code == status
    return answer.json()["error"]


@contextmanager
def known_callers(folder: Path, callers: Mapping[str, str]) -> Iterator[tuple[TokenChecker, str]]:
    """Gives this process the credentials of an orchestrator. Yields what a deployment with tokens needs.

    `callers` has the caller of each token. The orchestrator's checker accepts these tokens. A gateway calls it with the
    folder that is yielded second, which contains the authority alone.
    """
    tokens, clients = folder / "tokens.json", folder / "clients"
    for token, caller in callers.items():
        add_token(tokens, token, TokenEntry(caller))
    with process_credentials(issue(folder, "orchestrator/main")):
        clients.mkdir()
        (clients / CA).write_bytes((folder / "authority" / CA).read_bytes())
        yield TokenChecker(TokenConfig(file=str(tokens))), str(clients)


@asynccontextmanager
async def served_with_tokens(
    folder: Path, callers: Mapping[str, str]
) -> AsyncGenerator[tuple[ScriptedOrchestrator, str]]:
    """Yields a scripted orchestrator for `known_callers`, and the folder with which a gateway calls it."""
    with known_callers(folder, callers) as (checker, clients):
        async with served(tokens=checker) as orchestrator:
            describe(orchestrator, "text")
            with process_credentials(None):
                yield orchestrator, clients


def describe(
    orchestrator: ScriptedOrchestrator,
    *outputs: str,
    pipeline: str = "p",
    signature: Signature | None = None,
    **fields: Any,
) -> None:
    """Gives the orchestrator a pipeline with these outputs, named by their kinds.

    The pipeline has one stage if it has a `signature`. `fields` are further fields of the description.
    """
    stage = StageDescription(name="stage", engine="scripted", signature=signature)
    orchestrator.description = DescribePipelineResponse(
        pipeline=pipeline,
        stages=[] if signature is None else [stage],
        outputs=[OutputDescription(name=name, stage="stage", kind=_kind_of(name)) for name in outputs],
        protocol=orchestrator.description.protocol,
        **fields,
    )


def _kind_of(output: str) -> "TensorKind.ValueType":
    return TensorKind.Value(f"TENSOR_KIND_{output.upper()}")


@asynccontextmanager
async def asking(
    orchestrator: ScriptedOrchestrator, *, key: str = "none", **settings: Any
) -> AsyncGenerator[openai.AsyncOpenAI]:
    """Yields a client of a gateway in this process, which serves the pipeline "p" of a scripted orchestrator.

    `settings` are those of the gateway's config.
    """
    describe(orchestrator, "text")
    app = create_app(GatewayConfig("127.0.0.1:0", [[orchestrator.endpoint]], **{"hosts": ["gateway"], **settings}))
    transport = httpx2.ASGITransport(app=app)
    async with app.router.lifespan_context(app), httpx2.AsyncClient(transport=transport) as http:
        yield openai.AsyncOpenAI(base_url="http://gateway/v1", api_key=key, http_client=http, max_retries=0)


@asynccontextmanager
async def serving(*servers: str, everywhere: bool = False, **settings: Any) -> AsyncGenerator[str]:
    """Serves a gateway in this process. Yields its address, "host:port". `settings` are fields of its config.

    It listens at 127.0.0.1, or with `everywhere` at all addresses of this machine.
    """
    listen = f"127.0.0.1:{(port := PortPicker().pick())}"
    config = GatewayConfig(f"0.0.0.0:{port}" if everywhere else listen, [[each] for each in servers], **settings)
    stopping = asyncio.Event()
    task = asyncio.create_task(serve(config, stopping))
    try:
        url = f"http{'s' if config.https else ''}://{listen}/health"
        async with httpx.AsyncClient(verify=False) as http, asyncio.timeout(30):  # noqa: S501 - of this process
            while not await _is_healthy(http, url):
                assert not task.done(), "the gateway ended"
                await asyncio.sleep(0.02)
        yield listen
    finally:
        stopping.set()
        await task


def watched_limits(monkeypatch: pytest.MonkeyPatch, **settings: Any) -> Limits:
    """Returns the limits that the next gateways have. `settings` are settings of the gateway's config."""
    shared = Limits(GatewayConfig("127.0.0.1:0", [["127.0.0.1:1"]], **settings))
    monkeypatch.setattr(service, "Limits", lambda config: shared)
    return shared


async def until(condition: Callable[[], object]) -> None:
    """Waits until a condition holds."""
    while not condition():
        await asyncio.sleep(0.01)


async def rejection(address: str, **settings: Any) -> tuple[Response, str]:
    """Opens a WebSocket that must be rejected. Returns the response and the message of its error."""
    with pytest.raises(websockets.InvalidStatus) as caught:
        await websockets.connect(address, **settings)
    return caught.value.response, json.loads(caught.value.response.body or b"")["error"]["message"]


async def _is_healthy(http: httpx.AsyncClient, url: str) -> bool:
    try:
        return (await http.get(url)).is_success
    except httpx.TransportError:
        return False
