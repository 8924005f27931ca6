"""A raw TCP socket: blocking, one connection, received into a tensor that is there already."""

import socket

from benchmarks.edge_ways.base import Bytes, Receiver, Sender, target


class RawTcpSender(Sender):
    """Connects."""

    async def open(self) -> None:
        self._socket = socket.create_connection(self.peers[0].recv())
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    async def close(self) -> None:
        self._socket.close()

    async def send(self, tensor: Bytes) -> None:
        self._socket.sendall(tensor.data)


class RawTcpReceiver(Receiver):
    """Listens."""

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
