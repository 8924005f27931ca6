"""Prepares the processes that run tests, of which several may run at once.

Each of several has its own /dev/shm and its own loopback interface: tests check that nothing remains in /dev/shm, and
choose free ports on the loopback interface.
"""

import ctypes
import gc
import os
import signal
import subprocess
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

pytest_plugins = (
    "tests.browser",
    "tests.environments",
    "tests.process_state",
    "tests.resuming",
    "tests.scheduling",
    "tests.shared",
    "tests.targets",
)

_CLONE_NEWNS, _CLONE_NEWNET = 0x20000, 0x40000000
_MS_REC, _MS_PRIVATE = 0x4000, 0x40000
_LOOPBACK_UP = ("ip", "link", "set", "lo", "up")
_IN_ONE_OF_SEVERAL = "PYTEST_XDIST_WORKER" in os.environ


def pytest_configure() -> None:
    """Called in each process before any test is imported."""
    # Tests read models from folders only. Hugging Face's libraries would look for newer ones on their hub.
    os.environ["HF_HUB_OFFLINE"] = "1"
    if _IN_ONE_OF_SEVERAL:
        _leave_the_host()
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # A shell makes its background jobs ignore Ctrl-C. The commands under test would inherit that.
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """Called when all tests are imported. The garbage collector need not examine their modules."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Disables the garbage collector: objects without references are freed at once, and reference cycles are not."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def _tiny_model(write: str) -> Any:
    """Returns a fixture: the folder of a tiny model, which all tests of a process share, and do not write to."""

    @pytest.fixture(scope="session")
    def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
        module, _, function = write.partition(".")
        path = tmp_path_factory.mktemp(module)
        # Imports torch, which most tests do without.
        getattr(import_module(f"stagemesh.tiny_models.{module}"), function)(path)
        return path

    return folder


tiny_qwen3_omni = _tiny_model("qwen3_omni.write")
tiny_qwen3_tts = _tiny_model("qwen3_tts.write_custom_voice")
"""A model with voices by name."""
tiny_qwen3_tts_base = _tiny_model("qwen3_tts.write_base")
"""A model that clones voices."""
tiny_qwen2_5_omni = _tiny_model("qwen2_5_omni.write")


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
