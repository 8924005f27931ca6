from pathlib import Path

import pytest

from stagemesh.common.host import available_bytes

MIB = 1 << 20


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A host with 1000 MiB of available memory."""
    write(tmp_path / "proc/meminfo", f"MemTotal: {2000 * 1024} kB\nMemAvailable: {1000 * 1024} kB\n")
    return tmp_path


def add_v2_group(folder: Path, *, limit: str) -> None:
    write(folder / "memory.max", f"{limit}\n")
    write(folder / "memory.current", f"{30 * MIB}\n")
    write(folder / "memory.stat", f"anon 1\ninactive_file {10 * MIB}\n")


def add_v1_group(folder: Path, *, limit: int) -> None:
    write(folder / "memory.limit_in_bytes", f"{limit}\n")
    write(folder / "memory.usage_in_bytes", f"{30 * MIB}\n")
    write(folder / "memory.stat", f"total_inactive_file {10 * MIB}\n")


def test_a_host_without_groups_gives_its_available_memory(root: Path) -> None:
    assert available_bytes(root) == 1000 * MIB


def test_the_limit_of_a_container_counts(root: Path) -> None:
    write(root / "proc/self/cgroup", "0::/\n")
    add_v2_group(root / "sys/fs/cgroup", limit=str(100 * MIB))
    assert available_bytes(root) == 80 * MIB


def test_the_limit_of_a_parent_group_counts(root: Path) -> None:
    write(root / "proc/self/cgroup", "0::/outer/inner\n")
    add_v2_group(root / "sys/fs/cgroup/outer", limit=str(100 * MIB))
    add_v2_group(root / "sys/fs/cgroup/outer/inner", limit="max")
    assert available_bytes(root) == 80 * MIB


def test_a_limit_above_the_available_memory_changes_nothing(root: Path) -> None:
    write(root / "proc/self/cgroup", "0::/\n")
    add_v2_group(root / "sys/fs/cgroup", limit=str(5000 * MIB))
    assert available_bytes(root) == 1000 * MIB


def test_the_limit_of_a_version_1_group_counts(root: Path) -> None:
    write(root / "proc/self/cgroup", "5:cpu,cpuacct:/box\n4:memory:/box\n1:name=systemd:/box\n")
    add_v1_group(root / "sys/fs/cgroup/memory/box", limit=100 * MIB)
    assert available_bytes(root) == 80 * MIB


def test_a_version_1_path_of_the_host_falls_back_to_the_mount(root: Path) -> None:
    write(root / "proc/self/cgroup", "4:memory:/docker/0123\n")
    add_v1_group(root / "sys/fs/cgroup/memory", limit=100 * MIB)
    assert available_bytes(root) == 80 * MIB


def test_a_group_over_its_limit_leaves_nothing(root: Path) -> None:
    write(root / "proc/self/cgroup", "0::/\n")
    add_v2_group(root / "sys/fs/cgroup", limit=str(5 * MIB))
    assert available_bytes(root) == 0


def test_a_system_without_this_information_gives_none(tmp_path: Path) -> None:
    assert available_bytes(tmp_path) is None


def test_this_host_has_memory() -> None:
    assert (available_bytes() or 0) > 0
