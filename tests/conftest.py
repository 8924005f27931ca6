"""Gives each of several test processes that run at once its own /dev/shm and its own loopback interface.

Tests check that nothing remains in /dev/shm, and choose free ports on the loopback interface.
"""

import ctypes
import os
import signal
import subprocess

import pytest

_CLONE_NEWNS, _CLONE_NEWNET = 0x20000, 0x40000000
_MS_REC, _MS_PRIVATE = 0x4000, 0x40000
_LOOPBACK_UP = ("ip", "link", "set", "lo", "up")


def pytest_configure() -> None:
    """Called in each process before any test is imported."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        _leave_the_host()
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # A shell makes its background jobs ignore Ctrl-C. The commands under test would inherit that.
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _leave_the_host() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    _check(libc.unshare(_CLONE_NEWNS | _CLONE_NEWNET))
    _check(libc.mount(None, b"/", None, _MS_REC | _MS_PRIVATE, None))
    _check(libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, None))
    subprocess.run([*_LOOPBACK_UP], check=True)


def _check(status: int) -> None:
    if status != 0:
        reason = os.strerror(ctypes.get_errno())
        pytest.exit(f"several processes of tests need namespaces of their own ({reason}); run them without -n", 4)
