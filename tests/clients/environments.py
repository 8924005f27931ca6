"""The environments of stock clients: each has the packages of one client in locked versions, and nothing of Stagemesh.

Make the environments of some clients, or of all: python -m tests.clients.environments [--newest] [NAME...]
"""

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib import metadata
from pathlib import Path

from pydantic import TypeAdapter

ROOT = Path(__file__).resolve().parents[2]
HERE = ROOT / "tests/clients"
RESULTS = HERE / "results"
_NPM = ("npm",)
_LOCKED = ("--require-hashes", "--no-deps", "-r")
_VERSIONS = """\
import importlib.metadata, json, sys
print(json.dumps({name: importlib.metadata.version(name) for name in sys.argv[1:]}))"""


@dataclass(frozen=True)
class StockClient:
    """A client of clients.toml, whose script is in the folder with its name."""

    name: str
    models: Sequence[str]
    packages: Sequence[str] = ()
    linked: Sequence[str] = ()
    installed: Sequence[str] = ()
    recorded: Mapping[str, str] = field(default_factory=dict[str, str])
    sampled: bool = False
    gaps: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def folder(self) -> Path:
        """The folder of the script."""
        return HERE / self.name

    @cached_property
    def is_node(self) -> bool:
        """Whether the client runs in node."""
        return (self.folder / "client.mjs").exists()

    @property
    def is_guest(self) -> bool:
        """Whether the client has no environment, but runs in .venv."""
        return bool(self.installed or self.recorded)

    @property
    def lock(self) -> Path:
        """The file with the versions of all its packages."""
        return self.folder / "package-lock.json" if self.is_node else ROOT / f"requirements/clients/{self.name}.txt"

    @property
    def names(self) -> Sequence[str]:
        """The names of the packages whose versions the matrix shows."""
        if self.is_node:
            return list(json.loads((self.folder / "package.json").read_text())["dependencies"])
        return [*self.installed, *self.recorded] or [package.partition("[")[0] for package in self.packages]

    @property
    def digest(self) -> str:
        """A digest of the lock file, the script and the modules that scripts share, which a result states."""
        ending = "mjs" if self.is_node else "py"
        files = [self.folder / f"client.{ending}", *sorted((HERE / "shared").glob(f"*.{ending}"))]
        locked = b"" if self.is_guest else self.lock.read_bytes()
        return hashlib.sha256(locked + b"".join(each.read_bytes() for each in files)).hexdigest()[:16]


CLIENTS: Mapping[str, StockClient] = {
    name: TypeAdapter(StockClient).validate_python({"name": name, **settings})
    for name, settings in tomllib.loads((HERE / "clients.toml").read_text()).items()
}


class Environment:
    """The packages of a client: the locked versions, or the newest ones."""

    def __init__(self, client: StockClient, *, newest: bool = False) -> None:
        self.client, self._newest = client, newest
        self.folder = ROOT / ".venv/clients" / ("newest" if newest else "") / client.name
        self._python = Path(sys.executable) if client.is_guest else self.folder / "bin/python"

    def make(self) -> None:
        """Installs the packages. Does nothing if these are installed already."""
        stamp = self.folder / ".lock"
        if self.client.is_guest:
            return
        if not self._newest and stamp.exists() and stamp.read_bytes() == self.client.lock.read_bytes():
            return
        shutil.rmtree(self.folder, ignore_errors=True)
        self._install_in_node() if self.client.is_node else self._install_in_python()
        shutil.copy(self.client.lock, stamp)

    def _install_in_node(self) -> None:
        self.folder.mkdir(parents=True)
        shutil.copy(self.client.folder / "package.json", self.folder)
        if not self._newest:
            shutil.copy(self.client.lock, self.folder)
        packages = ["install", *(f"{name}@latest" for name in self.client.names)] if self._newest else ["ci"]
        quiet = ("--no-audit", "--no-fund", "--loglevel=error")
        subprocess.run([*_NPM, *packages, *quiet], cwd=self.folder, check=True)

    def _install_in_python(self) -> None:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", self.folder], check=True)
        pip = [str(Path(sys.executable).with_name("uv")), "pip", "install", "--quiet", "--python", str(self._python)]
        wanted = self.client.packages if self._newest else [*_LOCKED, str(self.client.lock)]
        subprocess.run([*pip, *wanted], check=True)
        (packages,) = self.folder.glob("lib/python*/site-packages")
        for distribution in map(metadata.distribution, self.client.linked):
            for name in {file.parts[0] for file in distribution.files or ()} - {".."}:
                (packages / name).symlink_to(Path(str(distribution.locate_file(name))))

    def versions(self) -> Mapping[str, str]:
        """Returns the installed versions of the client's packages by name."""
        if self.client.recorded:
            return self.client.recorded
        if self.client.is_node:
            files = {name: self.folder / "node_modules" / name / "package.json" for name in self.client.names}
            return {name: json.loads(file.read_text())["version"] for name, file in files.items()}
        command = [str(self._python), "-c", _VERSIONS, *self.client.names]
        versions: dict[str, str] = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
        return versions

    def command(self) -> Sequence[str]:
        """Returns the command line of the client's script.

        A copy of a script for node runs in the environment, because node looks for packages next to the script.
        """
        if not self.client.is_node:
            return [str(self._python), str(self.client.folder / "client.py")]
        for script in (self.client.folder / "client.mjs", HERE / "shared/features.mjs"):
            shutil.copy(script, self.folder)
        return ["node", str(self.folder / "client.mjs")]


def main() -> None:
    """Makes the environments of the clients that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--newest", action="store_true", help="install the newest versions instead of the locked ones")
    parser.add_argument("--sampled", action="store_true", help="choose the clients that CI runs")
    parser.add_argument("names", nargs="*", help="the clients, by default all")
    arguments = parser.parse_args()
    sampled = [name for name, client in CLIENTS.items() if client.sampled]
    for name in sampled if arguments.sampled else arguments.names or CLIENTS:
        Environment(CLIENTS[name], newest=arguments.newest).make()


if __name__ == "__main__":
    main()
