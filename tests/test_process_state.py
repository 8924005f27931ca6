"""State of the process that a test changes is found and restored."""

import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.process_state import unchanged


def _change_umask() -> None:
    os.umask(os.umask(0) ^ 0o010)


def _change_limit() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 1, hard))


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda: os.environ.update(ABC="1"), "ABC from None to '1'"),
        (lambda: os.chdir("/"), "working directory"),
        (_change_umask, "umask"),
        (_change_limit, "RLIMIT_NOFILE"),
        (lambda: signal.signal(signal.SIGUSR1, signal.SIG_IGN), "SIGUSR1"),
    ],
)
def test_a_change_is_named_and_undone(change: Callable[[], object], name: str) -> None:
    before = _read_state()
    with pytest.raises(pytest.fail.Exception, match=name), unchanged():
        change()
    assert _read_state() == before


def _read_state() -> tuple[object, ...]:
    limit, handler = resource.getrlimit(resource.RLIMIT_NOFILE), signal.getsignal(signal.SIGUSR1)
    return dict(os.environ), Path.cwd(), limit, handler


def test_the_settings_of_torch_are_restored() -> None:
    import torch

    with pytest.raises(pytest.fail.Exception, match="torch dtype"), unchanged():
        torch.set_default_dtype(torch.float64)
    assert torch.get_default_dtype() is torch.float32
