import socket

import pytest

from stagemesh.cli.launcher.ports import CANDIDATES, PortPicker, check_listen
from stagemesh.common.errors import InvalidRequestError, NotReadyError
from tests.rpc.call_errors import raises


def test_picked_ports_are_free_and_distinct() -> None:
    picker = PortPicker()
    ports = [picker.pick() for _ in range(50)]
    assert len(set(ports)) == 50
    assert all(port in CANDIDATES for port in ports)


def test_the_port_after_another_is_used_if_it_is_free() -> None:
    picker = PortPicker()
    # The port after a random one may belong to another program.
    port = next(port for port in iter(picker.pick, None) if picker.pick_after(port) == port + 1)
    assert picker.pick_after(port) in CANDIDATES
    assert picker.pick_after(port) != port + 1


def test_the_port_after_another_is_not_used_if_it_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        taken = holder.getsockname()[1]
        assert PortPicker().pick_after(taken - 1) in CANDIDATES


def test_a_port_in_use_is_reported_with_its_remedy() -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        with raises(NotReadyError, reason="PORT_IN_USE", match=f"{port}.*--port"):
            check_listen(f"127.0.0.1:{port}")


def test_a_free_port_is_accepted() -> None:
    check_listen(f"127.0.0.1:{PortPicker().pick()}")


@pytest.mark.parametrize("listen", ["7780", "127.0.0.1:", "127.0.0.1:x", "127.0.0.1:70000"])
def test_an_invalid_address_is_rejected(listen: str) -> None:
    with pytest.raises(InvalidRequestError, match="not an address"):
        check_listen(listen)
