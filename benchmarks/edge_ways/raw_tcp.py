"""A raw TCP socket: one blocking connection, received into an existing tensor."""

import socket

from benchmarks.edge_ways.base import Bytes, Receiver, Sender, target


class RawTcpSender(Sender):
    """Connects to the receiver and writes."""

    async def open(self) -> None:
        self._socket = socket.create_connection(self.peers[0].recv())
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    async def close(self) -> None:
        self._socket.close()

    async def send(self, tensor: Bytes) -> None:
        self._socket.sendall(tensor.data)


class RawTcpReceiver(Receiver):
    """Listens for the sender and reads."""

    async def open(self) -> None:
        with socket.create_server((self.place.address, 0)) as listener:
            self.peers[0].send(listener.getsockname())
            self._socket, _ = listener.accept()

    async def close(self) -> None:
        self._socket.close()

    async def receive(self, size_bytes: int) -> Bytes:
        tensor = target(size_bytes)
        left = tensor.data
        while left:
            left = left[self._socket.recv_into(left) :]
        return tensor
