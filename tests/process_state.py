"""State of the test process that all files of tests share. A file that leaves it changed fails, and it is restored.

Otherwise the outcome of a test would depend on the files that happened to run before it in the same process.
"""

import multiprocessing
import os
import resource
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest

from stagemesh.rpc.credentials import PROCESS, Credentials

# pytest names the current test. Libraries read or set the others when they are loaded, and never again.
_NOT_OURS = (
    *("PYTEST_", "FFPA_", "KMP_", "NIXL_", "PYTORCH_NVML_", "TILELANG_", "TORCHAO_", "TORCHINDUCTOR_", "TQDM_"),
    *("TRITON_", "UCX_"),
)
# pytest-timeout owns SIGALRM, and nothing can handle SIGKILL and SIGSTOP.
_SIGNALS = set(signal.Signals) - {signal.SIGALRM, signal.SIGKILL, signal.SIGSTOP}
_LIMITS = {name: limit for name, limit in vars(resource).items() if name.startswith("RLIMIT_")}


class _Part(NamedTuple):
    read: Callable[[], Any]
    restore: Callable[[Any], object]


@pytest.fixture(scope="module", autouse=True)
def unchanged_process_state() -> Iterator[None]:
    """Fails after the last test of a file if the file leaves the process changed."""
    with unchanged():
        yield


@contextmanager
def unchanged() -> Iterator[None]:
    """Restores what the block changes of the process, and then fails the test if the block changed anything."""
    before = {name: part.read() for name, part in _parts().items()}
    yield
    leaks = list[str]()
    for name, part in _parts().items():
        wanted, found = before[name] if name in before else _after_import(name), part.read()
        if found != wanted:
            part.restore(wanted)
            leaks.append(f"{name}: {_difference(wanted, found)}")
    if leaks:
        pytest.fail(f"this file leaves the process changed ({'; '.join(leaks)}); restore it", pytrace=False)


def _parts() -> Mapping[str, _Part]:
    parts = {
        "environment": _Part(_environment, _replace_environment),
        "working directory": _Part(os.getcwd, os.chdir),
        "umask": _Part(_umask, os.umask),
        "signal handlers": _Part(lambda: {each.name: signal.getsignal(each) for each in _SIGNALS}, _handle),
        "resource limits": _Part(lambda: {name: resource.getrlimit(each) for name, each in _LIMITS.items()}, _limit),
        "credentials": _Part(lambda: PROCESS.credentials.tls, lambda _: PROCESS.use(Credentials())),
        "start method of multiprocessing": _Part(
            lambda: multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0],
            lambda method: multiprocessing.set_start_method(method, force=True),
        ),
    }
    if (torch := sys.modules.get("torch")) is not None:
        parts |= {
            "torch threads": _Part(torch.get_num_threads, torch.set_num_threads),
            "torch dtype": _Part(lambda: str(torch.get_default_dtype()), _set_dtype),
            "torch device": _Part(lambda: str(torch.get_default_device()), torch.set_default_device),
            "torch determinism": _Part(torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
        }
    return parts


def _after_import(name: str) -> object:
    """Returns the state of torch after it is imported, for a file that imports it first."""
    threads = os.environ.get("OMP_NUM_THREADS")
    return {
        "torch threads": int(threads) if threads else sys.modules["torch"].get_num_threads(),
        "torch dtype": "torch.float32",
        "torch device": "cpu",
        "torch determinism": False,
    }[name]


def _difference(wanted: object, found: object) -> str:
    if isinstance(wanted, dict) and isinstance(found, dict):
        changed = [each for each in wanted | found if wanted.get(each) != found.get(each)]
        return ", ".join(f"{each} from {wanted.get(each)!r} to {found.get(each)!r}" for each in changed)
    return f"from {wanted!r} to {found!r}"


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(_NOT_OURS)}


def _replace_environment(wanted: Mapping[str, str]) -> None:
    for name in _environment().keys() - wanted.keys():
        del os.environ[name]
    os.environ.update(wanted)


def _umask() -> int:
    umask = os.umask(0o077)
    os.umask(umask)
    return umask


def _handle(wanted: Mapping[str, Any]) -> None:
    for name, handler in wanted.items():
        # Python cannot set a handler that it did not set itself.
        if handler is not None and handler != signal.getsignal(signal.Signals[name]):
            signal.signal(signal.Signals[name], handler)


def _limit(wanted: Mapping[str, tuple[int, int]]) -> None:
    for name, limit in wanted.items():
        resource.setrlimit(_LIMITS[name], limit)


def _set_dtype(name: str) -> None:
    torch = sys.modules["torch"]
    torch.set_default_dtype(getattr(torch, name.removeprefix("torch.")))
