"""Which replicas share a host, so that a plan can put neighbours side by side.

A hint and no more: that two replicas share memory is proved when they meet (`local`).
"""

import hashlib
import os
from functools import cache
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NETWORK = Path("/proc/self/ns/net")


@cache
def host_token() -> str:
    """The same for all processes that can reach each other's local streams: one running kernel, one network namespace,
    one user. Empty where the system does not say.
    """
    try:
        network = _NETWORK.stat()
        facts = f"{_BOOT_ID.read_text().strip()}/{network.st_dev}/{network.st_ino}/{os.geteuid()}"
    except OSError:
        return ""
    return hashlib.blake2b(facts.encode(), digest_size=8).hexdigest()
