"""Credentials for tests: certificates of an authority, and their use by this process."""

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from stagemesh.cli.launcher.certificates import Authority
from stagemesh.rpc.credentials import PROCESS, Credentials

HOSTS = ("127.0.0.1", "localhost")


def issue(folder: Path, *names: str, authority: str = "authority", hours: float = 1) -> Path:
    """Writes a certificate with these roles and names to a new folder in `folder`, and returns the new folder.

    `authority` is the name of the authority, which is created if it does not exist.
    """
    own = folder / f"{authority}-{'-'.join(names).replace('/', '-').replace('*', 'any')}-{hours:g}"
    return Authority(folder / authority).issue(own, names, hosts=HOSTS, days=hours / 24)


@contextmanager
def process_credentials(tls: Path | None, *, token_file: Path | None = None) -> Generator[None]:
    """Makes this process use the certificates in a folder within the block."""
    former = PROCESS.credentials
    PROCESS.use(Credentials(tls, token_file=token_file, needs_certificate=False))
    try:
        yield
    finally:
        PROCESS.use(former)
