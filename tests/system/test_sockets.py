"""Every socket at which a process of a deployment with certificates listens, and proof of who may use it.

A socket is either authenticated (by certificates, a secret, or the user of the process), or the operator has opted in
by a name: `--gateway`, `--metrics` or `insecure_tcp`. A test fails if a process has any other socket.
"""

import asyncio
import os
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, TypeAlias

import httpx
import psutil
import pytest

from stagemesh.cli.launcher.ports import PortPicker
from stagemesh.client import Client
from stagemesh.common.wire.versions import own_protocol
from stagemesh.rpc.credentials import CA, CERTIFICATE, KEY
from stagemesh.v1 import stage_pb2
from tests.credentials import issue
from tests.deployment import Deployment, deployed
from tests.gateway.making import configured_gateway, served_with_tokens
from tests.system.added_transforms import add_function
from tests.system.pipelines import pipeline_file
from tests.system.split_stage import write_pipeline

pytestmark = pytest.mark.timeout(300)

_ACCEPTS = 0x10000
"""The flag in /proc/PID/net/unix of a unix socket that accepts connections."""
_ANSWER_S = 2.0
_OTHER_USER = 65534
_EVENTS = 100
_HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
_TLS_ALERT = 0x15
_LOOPBACK = ("127.0.0.1", "::1")
Start: TypeAlias = Callable[..., AbstractContextManager[Deployment]]


class Listener(NamedTuple):
    """A socket that accepts connections or datagrams, and a process that has it."""

    kind: str
    """"tcp", "udp", "unix", or "unix datagrams"."""
    address: str
    """"host:port", a path, or "@" and the name of an abstract socket."""
    process_id: int


# -- finding them


def find_listeners(process_id: int) -> set[Listener]:
    """Returns the listening sockets of a process and of all its descendants."""
    found, root = set[Listener](), psutil.Process(process_id)
    for process in (root, *root.children(recursive=True)):
        # Processes and descriptors may end meanwhile.
        with suppress(psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
            found |= set(_listeners_of(process))
    return found


def _listeners_of(process: psutil.Process) -> Iterator[Listener]:
    folder = Path(f"/proc/{process.pid}")
    lines = [line.split() for line in (folder / "net/unix").read_text().splitlines()[1:]]
    accepting = {f"socket:[{line[6]}]" for line in lines if int(line[3], 16) & _ACCEPTS}
    for each in process.net_connections("all"):
        if each.family is socket.AF_UNIX:
            if each.type is socket.SOCK_DGRAM and each.laddr:
                yield Listener("unix datagrams", str(each.laddr), process.pid)
            elif str((folder / f"fd/{each.fd}").readlink()) in accepting:
                yield Listener("unix", str(each.laddr), process.pid)
        elif each.status == psutil.CONN_LISTEN or (each.type is socket.SOCK_DGRAM and not each.raddr):
            # gRPC listens at IPv4 addresses with sockets of IPv6.
            address = f"{each.laddr.ip.removeprefix('::ffff:')}:{each.laddr.port}"
            yield Listener("udp" if each.type is socket.SOCK_DGRAM else "tcp", address, process.pid)


def test_all_kinds_of_sockets_are_found(tmp_path: Path) -> None:
    kinds = {"tcp": socket.AF_INET, "udp": socket.AF_INET, "unix": socket.AF_UNIX}
    before = find_listeners(os.getpid())
    for kind, family in kinds.items():
        with socket.socket(family, socket.SOCK_DGRAM if kind == "udp" else socket.SOCK_STREAM) as opened:
            opened.bind(str(tmp_path / "socket") if kind == "unix" else ("127.0.0.1", 0))
            if kind != "udp":
                opened.listen()
            (found,) = find_listeners(os.getpid()) - before
            name = opened.getsockname()
            assert found == (kind, name if kind == "unix" else f"127.0.0.1:{name[1]}", os.getpid())


# -- attributing them


class Users(NamedTuple):
    """TLS contexts: of a user with a certificate, and of users without one or with one of another authority."""

    known: ssl.SSLContext
    unknown: tuple[ssl.SSLContext, ssl.SSLContext]

    @classmethod
    def of(cls, authority: Path, stranger: Path) -> "Users":
        ca = str(authority / CA)
        contexts = [ssl.create_default_context(cafile=ca) for _ in range(3)]
        for context, folder in zip(contexts, (authority / "client", stranger), strict=False):
            context.load_cert_chain(folder / CERTIFICATE, folder / KEY)
        for context in contexts:
            context.set_alpn_protocols(["h2"])
        return cls(contexts[0], (contexts[1], contexts[2]))


def _answer(port: int, context: ssl.SSLContext | None) -> bytes:
    """Returns the first bytes with which a port answers HTTP/2, over TLS with a context. Empty if it refuses."""
    with suppress(OSError), ExitStack() as stack:
        connection = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=_ANSWER_S))
        if context is not None:
            connection = stack.enter_context(context.wrap_socket(connection, server_hostname="localhost"))
        connection.sendall(_HTTP2)
        return connection.recv(64)
    return b""


def _needs_certificate(port: int, users: Users) -> bool:
    """Returns whether a port answers a user with a certificate, and no other."""
    # A port of another protocol gives no answer to any user, so this is tried first.
    if not _answer(port, users.known) or any(_answer(port, context) for context in users.unknown):
        return False
    plain = _answer(port, None)
    return not plain or plain[0] == _TLS_ALERT


@contextmanager
def _as_other_user() -> Iterator[None]:
    os.seteuid(_OTHER_USER)
    try:
        yield
    finally:
        os.seteuid(0)


def _local_answer(address: str, first: bytes) -> bytes | None:
    """Returns what a unix socket answers, empty if it closes the connection, or None if the system refuses the user."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(_ANSWER_S)
        try:
            connection.connect(f"\0{address[1:]}" if address.startswith("@") else address)
        except PermissionError:
            return None
        try:
            connection.sendall(first)
            return connection.recv(64)
        except ConnectionError:
            return b""
        except TimeoutError:
            return b"it waits for more"


def _is_private(address: str, hello: stage_pb2.Hello) -> bool:
    """Returns whether other users cannot use a unix socket, nor the same user without its secret, if it is abstract.

    A socket in a file belongs to the user of the process: the system lets no other user connect.
    """
    message = stage_pb2.PutChunkRequest(hello=hello).SerializeToString()
    # A local stream of a producer, with all but the secret.
    first = b"\0" + len(message).to_bytes(4, "little") + message
    with _as_other_user():
        others = _local_answer(address, first)
    return _local_answer(address, first) == others == b"" if address.startswith("@") else others is None


def attribute(each: Listener, up: Deployment, *, users: Users, hello: stage_pb2.Hello, plain: frozenset[str]) -> str:
    """Returns what protects a socket, or "" if nothing does. `plain` are the stages whose libraries may listen."""
    ready = next(event for event in up.history if event.get("event") == "ready")
    opt_ins = {ready["gateway_url"].removeprefix("http://").removesuffix("/v1"): "--gateway"}
    opt_ins |= dict.fromkeys(ready["metrics_endpoints"].values(), "--metrics")
    if each.kind == "unix" and _is_private(each.address, hello):
        return "its user, and a secret if it is abstract"
    host, _, port = each.address.rpartition(":")
    if each.address in opt_ins:
        return opt_ins[each.address]
    if each.kind == "tcp" and _needs_certificate(int(port), users):
        return "mutual TLS"
    # An opt-in opens only the interface of the replica.
    is_local = each.kind.startswith("unix") or host in _LOOPBACK
    return "insecure_tcp" if is_local and _stage_of(each.process_id, up) in plain else ""


def _stage_of(process_id: int, up: Deployment) -> str:
    stages = {status["process_id"]: status["stage"] for status in up.statuses.values()}
    process = psutil.Process(process_id)
    return str(next((stages[each.pid] for each in (process, *process.parents()) if each.pid in stages), ""))


# -- the deployments


LISTENING = """\
from stagemesh.common.plugins.descriptors import Emitted, FunctionDescriptor, Signature
from stagemesh.common.wire.tensors import TensorSpec

_TEXT = TensorSpec("uint8", ("bytes",))
DESCRIPTOR = FunctionDescriptor(Signature({"text": _TEXT}, {"text": Emitted(_TEXT, kind="text")}), "added_echo:Echo")


class Echo:
    def __init__(self, model, options):
        pass

    def open(self, *, seed, options):
        return None

    def __call__(self, batch):
        return [[call.packet] if call.packet else [] for call in batch]
"""
FAKES = """\
pipeline: listening
stages:
  source: {{engine: fake, function: source, options: {{steps: 30, step_s: 0.05, size_bytes: 65536}}}}
  relay: {{engine: fake, function: relay, options: {{size_bytes: 65536}}, data_plane: {{shared_arena: false}}{nixl}}}
  frames: {{engine: fake, function: frames}}
  other: {{engine: fake, function: relay{nixl}}}
  echo: {{engine: function, function: echo}}
edges:
  - {{from: source, to: relay, connector: shm}}
  - {{from: relay, to: frames, connector: grpc}}
  - {{from: relay, to: other, connector: {connector}}}
  - {{from: source, to: echo}}
outputs: {{text: source, frames: frames, other: other, echo: echo}}
media: {{store: {store}}}
"""


@contextmanager
def fakes(folder: Path, *arguments: str, nixl: bool = False) -> Iterator[Deployment]:
    """Runs stages of the engines `fake` and `function`, a media service, a job server, a gateway, and metrics.

    An edge without memory that both ends share would use nixl if it was available.
    """
    settings = {"connector": "nixl", "nixl": ", insecure_tcp: true"} if nixl else {"connector": "auto", "nixl": ""}
    (folder / "store").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        add_function(folder, patch, name="echo", source=LISTENING)
        pipeline = pipeline_file(folder, FAKES.format(store=folder / "store", **settings))
        services = ("--jobs", "--metrics", "--gateway", "127.0.0.1:0")
        with deployed(pipeline, *services, *arguments, home=folder / "home") as up:
            yield up


def fakes_with_nixl(folder: Path, *arguments: str) -> AbstractContextManager[Deployment]:
    """Runs the same stages, with nixl over TCP by `insecure_tcp`."""
    return fakes(folder, *arguments, nixl=True)


def language_models(folder: Path, *arguments: str) -> AbstractContextManager[Deployment]:
    """Runs prefill and decode replicas of vLLM, with hand-over of KV caches by `insecure_tcp`, and a whole one."""
    pipeline = write_pipeline(folder)
    pipeline.write_text(pipeline.read_text().replace("split: {", "insecure_tcp: true\n    split: {"))
    return deployed(pipeline, *arguments, ready_s=240)


def diffusion_models(_: Path, *arguments: str) -> AbstractContextManager[Deployment]:
    """Runs a diffusion model in three services."""
    return deployed("examples/digits/pipeline.yaml", *arguments)


DEPLOYMENTS: dict[Start, frozenset[str]] = {
    fakes: frozenset[str](),
    fakes_with_nixl: frozenset({"relay", "other"}),
    diffusion_models: frozenset[str](),
    # Without the opt-in, torch's gloo listens on loopback, as docs/security.md says.
    language_models: frozenset({"thinker", "thinker-prefill", "whole"}),
}
"""The deployments, each with its stages that have `insecure_tcp`, or whose libraries listen on loopback."""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can try a socket as another user")
@pytest.mark.parametrize("start", DEPLOYMENTS)
def test_every_listening_socket_is_authenticated_or_named_by_the_operator(start: Start, tmp_path: Path) -> None:
    authority = tmp_path / "authority"
    stranger = issue(tmp_path, "client/local", "operator/local", authority="another")
    with start(tmp_path, "--tls", str(authority)) as up, Client(up.endpoint, tls=authority / "client") as client:
        found = find_listeners(up.process.pid)
        # Libraries may listen when the first request arrives.
        with closing(iter(client.generate("the digit seven"))) as events:
            for number, _ in zip(range(_EVENTS), events, strict=False):
                if number % (_EVENTS // 4) == 0:
                    found |= find_listeners(up.process.pid)
        found |= find_listeners(up.process.pid)
        described = client.describe()
        hello = stage_pb2.Hello(replica=up.replicas()[0], incarnation="1", pipeline=described.pipeline)
        hello.generation = described.generation
        hello.protocol.CopyFrom(own_protocol())
        users, plain = Users.of(authority, stranger), DEPLOYMENTS[start]
        attributed = {each: attribute(each, up, users=users, hello=hello, plain=plain) for each in sorted(found)}
        commands = {each: " ".join(psutil.Process(each.process_id).cmdline())[-100:] for each in found}
    addresses = {each.address for each in found}
    assert {status["endpoint"] for status in up.statuses.values()} <= addresses, "not all sockets were found"
    print("\n".join(f"{each.kind} {each.address}: {by}" for each, by in attributed.items()))
    unknown = [f"{each.kind} {each.address} of {commands[each]}" for each, by in attributed.items() if not by]
    assert not unknown, "\n".join(unknown)


async def test_a_gateway_of_tokens_answers_with_a_token_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listen = f"127.0.0.1:{PortPicker().pick()}"
    async with served_with_tokens(tmp_path, {"secret": "ada"}) as (orchestrator, clients):
        https = issue(tmp_path, "client/gateway")
        monkeypatch.setenv("SSL_CERT_FILE", str(https / CA))
        arguments = ("--listen", listen, "--server", orchestrator.endpoint, "--tls", clients, "--https", str(https))
        before = find_listeners(os.getpid())
        with configured_gateway(*arguments, url=f"https://{listen}") as url:
            opened = find_listeners(os.getpid()) - before
            tokens = [dict[str, str](), *({"authorization": f"Bearer {each}"} for each in ("wrong", "secret"))]
            models = [await asyncio.to_thread(httpx.get, f"{url}/v1/models/p", headers=each) for each in tokens]
    assert [each.address for each in opened] == [listen]
    assert [each.status_code for each in models] == [401, 401, 200]
