"""The script of a container's first process, which mounts the container's root and becomes the container's command."""

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.k8s.manifests import Manifest

_REPOSITORY = Path(__file__).parents[3]
_DEVICES = ("null", "zero", "full", "random", "urandom")
PATH = f"{sys.prefix}/bin:/usr/local/bin:/usr/bin:/bin"


@dataclass(frozen=True)
class Mount:
    """A file or folder that a container sees at `path`."""

    source: str
    path: str
    read_only: bool


@dataclass(frozen=True)
class Identity:
    """The user, groups and capabilities with which a container's command runs."""

    user: int
    group: int
    fs_group: int | None
    drops_capabilities: bool
    no_new_privileges: bool

    @classmethod
    def of(cls, pod_spec: Manifest, container: Manifest) -> "Identity":
        """Reads the security contexts of a pod and its container."""
        pod, own = pod_spec.get("securityContext", {}), container.get("securityContext", {})
        user = own.get("runAsUser", pod.get("runAsUser", 0))
        assert user != 0 or not pod.get("runAsNonRoot"), "runAsNonRoot forbids user 0"
        return cls(
            user,
            own.get("runAsGroup", pod.get("runAsGroup", 0)),
            pod.get("fsGroup"),
            drops_capabilities="ALL" in own.get("capabilities", {}).get("drop", []),
            no_new_privileges=own.get("allowPrivilegeEscalation") is False,
        )

    def command(self) -> list[str]:
        """Returns the command that runs another command with this identity."""
        options = [f"--reuid={self.user}", f"--regid={self.group}"]
        options += [f"--groups={self.fs_group}"] if self.fs_group is not None else ["--clear-groups"]
        options += ["--bounding-set=-all", "--inh-caps=-all"] if self.drops_capabilities else []
        options += ["--no-new-privs"] if self.no_new_privileges else []
        # A change of the user has cleared the signal that `unshare --kill-child` sets.
        return ["setpriv", *options, "--pdeathsig=KILL"]


def image() -> list[str]:
    """Returns the folders of this machine that stand for the container image."""
    system = ["/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc/ssl", "/etc/ld.so.cache", "/etc/localtime"]
    python = [sys.prefix, sys.base_prefix, str(_REPOSITORY), *sys.path]
    found = sorted({os.path.realpath(each) if each in python else each for each in (*system, *python) if each})
    return [each for each in found if Path(each).exists() and not _within(each, found)]


def container_script(
    root: Path,
    etc: Path,
    mounts: Sequence[Mount],
    *,
    read_only: bool,
    identity: Identity,
    variables: Mapping[str, str],
    arguments: Sequence[str],
) -> str:
    """Returns the shell script that becomes the first process of a container.

    `root` is an empty folder over which the root is mounted. `etc` contains the files of /etc.
    """
    lines = ["set -e", f"R={shlex.quote(str(root))}", 'mount -t tmpfs -o mode=0755 root "$R"']
    lines += [f'cp -a {shlex.quote(str(etc))} "$R/etc"', 'mkdir -p "$R/proc" "$R/dev/shm" "$R/sys" "$R/tmp"']
    lines += ['mount -t proc proc "$R/proc"', 'mount --rbind /sys "$R/sys"', 'mount --bind /dev/shm "$R/dev/shm"']
    lines += [f'touch "$R/dev/{device}"; mount --bind /dev/{device} "$R/dev/{device}"' for device in _DEVICES]
    lines += ['ln -s /proc/self/fd "$R/dev/fd"']
    image_mounts = [Mount(each, each, read_only=True) for each in image()]
    # A volume at /tmp must not hide a repository in /tmp: the outer folders first.
    for mount in sorted((*image_mounts, *mounts), key=lambda each: each.path.count("/")):
        source, target = shlex.quote(mount.source), f'"$R"{shlex.quote(mount.path)}'
        lines.append(f"mkdir -p $(dirname {target}); [ -d {source} ] && mkdir -p {target} || touch {target}")
        lines.append(f"mount --rbind {source} {target}")
        lines += [f"mount -o remount,bind,ro {target}"] if mount.read_only else []
    lines += ['mount -o remount,ro "$R"'] if read_only else []
    environment = [f"{name}={value}" for name, value in variables.items()]
    command = [*identity.command(), "env", "-i", *environment, *arguments]
    lines.append(f'exec chroot "$R" {shlex.join(command)}')
    return "\n".join(lines)


def _within(path: str, others: Sequence[str]) -> bool:
    return any(path.startswith(f"{other}/") for other in others)
