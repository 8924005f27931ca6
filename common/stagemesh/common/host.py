"""Identifies hosts, so that a plan can place replicas that exchange tensors on one host.

The result is only a hint: replicas prove that they share memory when they connect.
"""

import hashlib
import os
from functools import cache
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NETWORK = Path("/proc/self/ns/net")


@cache
def host_token() -> str:
    """Returns a token that is equal for all processes that can reach each other's local sockets: those of one running
    kernel, one network namespace and one user. Returns "" if the system does not say.
    """
    try:
        network = _NETWORK.stat()
        facts = f"{_BOOT_ID.read_text().strip()}/{network.st_dev}/{network.st_ino}/{os.geteuid()}"
    except OSError:
        return ""
    return hashlib.blake2b(facts.encode(), digest_size=8).hexdigest()
