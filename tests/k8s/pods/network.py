"""The network of simulated nodes: a bridge for each node, the cluster's DNS server, and relays in place of kube-proxy.

Everything is in one network namespace, the switch. A node's bridge is connected to the bridge between the nodes by one
cable, which `cut` unplugs.
"""

import asyncio
import ctypes
import itertools
import os
import socket
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, ExitStack, suppress
from typing import Any, Self, TypeAlias

import dns.flags
import dns.message
import dns.name
import dns.rcode
import dns.rdatatype
import dns.rrset

from tests.connectors.namespaces import HeldNamespaces, plug_in, skip_if_forbidden

DNS_ADDRESS = "10.77.0.1"
_PREFIX = 16
_CLONE_NEWNET = 0x40000000
_TTL_S = 5

Address: TypeAlias = tuple[str, int]
Resolve: TypeAlias = Callable[[str], Sequence[str] | None]
"""Returns the addresses of a name, or None if there is no such name."""
Choose: TypeAlias = Callable[[], Address | None]
"""Returns the address that a new connection reaches, or None if there is none."""


class Network:
    """The switch and its nodes. `with` removes them."""

    def __init__(self, *, nodes: int, resolve: Resolve) -> None:
        self._nodes, self._resolve = nodes, resolve
        self._stack = ExitStack()
        self._relays = AsyncExitStack()
        self._ports, self._cluster_ips = itertools.count(), itertools.count(1)
        self._pod_ips = [itertools.count(1) for _ in range(nodes)]

    async def __aenter__(self) -> Self:
        skip_if_forbidden()
        self._switch = self._stack.enter_context(HeldNamespaces())
        self._switch.run(f"ip link add hub type bridge && ip address add {DNS_ADDRESS}/{_PREFIX} dev hub")
        for node in range(self._nodes):
            # Without "arp off", the bridge of a node would answer for the addresses of the hub with its own hardware
            # address, which changes when a pod is plugged in or removed: pods would then lose all their packets.
            self._switch.run(
                f"ip link add node{node} type bridge && ip link set node{node} arp off && "
                f"ip link add up{node} type veth peer name down{node} && "
                f"ip link set up{node} master hub && ip link set down{node} master node{node} && "
                f"ip link set up{node} up && ip link set down{node} up && ip link set node{node} up"
            )
        self._switch.run("ip link set hub up")
        server = self.socket(self._switch, socket.SOCK_DGRAM)
        server.bind((DNS_ADDRESS, 53))
        loop = asyncio.get_running_loop()
        transport, _ = await loop.create_datagram_endpoint(lambda: _DnsServer(self._resolve), sock=server)
        self._stack.callback(transport.close)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._relays.aclose()
        self._stack.close()

    def plug_in(self, pod: HeldNamespaces, *, node: int) -> str:
        """Connects a pod to a node. Returns the pod's address, which no other pod has had."""
        address = f"10.77.{node + 1}.{next(self._pod_ips[node])}"
        plug_in(self._switch, pod, port=f"pod{next(self._ports)}", bridge=f"node{node}", address=f"{address}/{_PREFIX}")
        # Libraries find their own address by the route to an address outside, where nothing answers here.
        pod.run(f"ip route add default via {DNS_ADDRESS}")
        return address

    def cut(self, node: int) -> None:
        """Disconnects a node from the others and from clients. Its own pods still reach each other."""
        self._switch.run(f"ip link set up{node} down")

    def heal(self, node: int) -> None:
        """Connects a node again."""
        self._switch.run(f"ip link set up{node} up")

    async def relay_in_cluster(self, ports: dict[int, Choose]) -> str:
        """Relays the connections to a new address in the cluster, by port. Returns the address."""
        address = f"10.77.255.{next(self._cluster_ips)}"
        self._switch.run(f"ip address add {address}/32 dev hub")
        for port, choose in ports.items():
            listener = self.socket(self._switch)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((address, port))
            await self._relay(listener, choose, at=self._switch)
        return address

    async def relay_from_test(self, choose: Choose, *, at: HeldNamespaces | None = None) -> str:
        """Relays the connections to a new loopback address of the test, which is returned.

        They continue from the switch, or from the pod `at`.
        """
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        await self._relay(listener, choose, at=at or self._switch)
        host, port = listener.getsockname()
        return f"{host}:{port}"

    async def _relay(self, listener: socket.socket, choose: Choose, *, at: HeldNamespaces) -> None:
        relay = Relay(choose, lambda: self.socket(at))
        await relay.listen(listener)
        self._relays.push_async_callback(relay.close)

    @staticmethod
    def socket(place: HeldNamespaces, kind: int = socket.SOCK_STREAM) -> socket.socket:
        """Creates a socket in the network namespace of `place`, which it never leaves."""
        with ExitStack() as stack:
            own, other = [_open_namespace(stack, pid) for pid in ("thread-self", place.pid)]
            _enter(other)
            try:
                made = socket.socket(socket.AF_INET, kind)
            finally:
                _enter(own)
        made.setblocking(False)
        return made


class Relay:
    """Copies bytes between accepted connections and connections to addresses chosen one by one."""

    def __init__(self, choose: Choose, create_socket: Callable[[], socket.socket]) -> None:
        self._choose, self._create_socket = choose, create_socket
        self._tasks = set[asyncio.Task[None]]()

    async def listen(self, listener: socket.socket) -> None:
        """Starts to accept connections."""
        self._server = await asyncio.start_server(self._accepted, sock=listener)

    async def close(self) -> None:
        """Closes all connections."""
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        with suppress(OSError, asyncio.CancelledError):
            try:
                await self._connected(reader, writer)
                await _closed(writer)
            except BaseException:
                writer.transport.abort()
                raise

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        address = self._choose()
        if address is None:
            return
        raw = self._create_socket()
        try:
            await asyncio.get_running_loop().sock_connect(raw, address)
        except BaseException:
            raw.close()
            raise
        far_reader, far_writer = await asyncio.open_connection(sock=raw)
        try:
            await _either(_copy(reader, far_writer), _copy(far_reader, writer))
            await _closed(far_writer)
        except BaseException:
            far_writer.transport.abort()
            raise


class _DnsServer(asyncio.DatagramProtocol):
    """Answers queries for the names of Services."""

    def __init__(self, resolve: Resolve) -> None:
        self._resolve = resolve

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def datagram_received(self, data: bytes, addr: Any) -> None:
        query = dns.message.from_wire(data)
        question = query.question[0]
        answer = dns.message.make_response(query)
        answer.flags |= dns.flags.AA | dns.flags.RA
        found = self._resolve(question.name.to_text(omit_final_dot=True).lower())
        if found is None:
            answer.set_rcode(dns.rcode.NXDOMAIN)
        elif found and question.rdtype == dns.rdatatype.A:
            answer.answer.append(dns.rrset.from_text(question.name, _TTL_S, "IN", "A", *found))
        self._transport.sendto(answer.to_wire(), addr)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()


async def _closed(writer: asyncio.StreamWriter) -> None:
    """Closes a connection after the bytes that it still has to send, which a peer may never read."""
    writer.close()
    await writer.wait_closed()


async def _either(*copies: Coroutine[None, None, None]) -> None:
    """Waits until one of the directions ends, and ends the other one."""
    tasks = [asyncio.create_task(copy) for copy in copies]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _open_namespace(stack: ExitStack, process: int | str) -> int:
    descriptor = os.open(f"/proc/{process}/ns/net", os.O_RDONLY)
    stack.callback(os.close, descriptor)
    return descriptor


def _enter(descriptor: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns")
