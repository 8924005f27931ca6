import socket

import pytest

from stagemesh.common.errors import InvalidRequestError, NotReadyError
from stagemesh.orchestrator.launcher.ports import CANDIDATES, PortPicker, check_listen


def test_ports_are_free_and_never_the_same() -> None:
    picker = PortPicker()
    ports = [picker.pick() for _ in range(50)]
    assert len(set(ports)) == 50
    assert all(port in CANDIDATES for port in ports)


def test_the_port_beside_another_is_the_next_one_where_nobody_has_it() -> None:
    picker = PortPicker()
    port = picker.pick()
    beside = picker.pick_beside(port)
    with socket.create_server(("127.0.0.1", 0)) as holder:
        taken = holder.getsockname()[1]
        assert PortPicker().pick_beside(taken - 1) != taken
    assert beside in {port + 1, *CANDIDATES}
    assert picker.pick_beside(port) != beside


def test_a_port_in_use_is_named_with_its_remedy() -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        with pytest.raises(NotReadyError, match=f"{port}.*--port") as caught:
            check_listen(f"127.0.0.1:{port}")
    assert caught.value.reason == "PORT_IN_USE"


def test_a_free_port_is_fine() -> None:
    check_listen(f"127.0.0.1:{PortPicker().pick()}")


@pytest.mark.parametrize("listen", ["7780", "127.0.0.1:", "127.0.0.1:x", "127.0.0.1:70000"])
def test_what_is_no_address_is_refused(listen: str) -> None:
    with pytest.raises(InvalidRequestError, match="no address"):
        check_listen(listen)
