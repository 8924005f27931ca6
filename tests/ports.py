"""The addresses on which processes listen."""

import psutil


def listening(*processes: psutil.Process) -> set[tuple[str, int]]:
    """Returns the host and port of all addresses at which these processes accept connections or datagrams.

    gRPC listens at addresses of IPv4 by sockets of IPv6.
    """
    found = (each for process in processes for each in process.net_connections(kind="inet"))
    return {(each.laddr.ip.removeprefix("::ffff:"), each.laddr.port) for each in found if each.laddr and not each.raddr}


def listening_hosts(*processes: psutil.Process) -> set[str]:
    """Returns the hosts of these addresses."""
    return {host for host, _ in listening(*processes)}


def family(process_id: int) -> list[psutil.Process]:
    """Returns a process and all its descendants."""
    process = psutil.Process(process_id)
    return [process, *process.children(recursive=True)]
