"""Groups of commands, to which packages add commands.

Packages add commands by entry points in the group `stagemesh.commands`. They are imported only if their help is printed
or if they are called.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import typer
from typer.core import TyperGroup

from stagemesh.common.errors import NotReadyError


class CommandGroup(TyperGroup):
    """A group with its own commands, and with the commands that packages add to it under other names.

    The entry point `GROUP.NAME` adds the command `stagemesh GROUP NAME`. The entry point `NAME` adds `stagemesh NAME`.
    """

    is_root = False

    def list_commands(self, ctx: Any) -> list[str]:
        own = super().list_commands(ctx)
        return [*own, *sorted(self._added().keys() - set(own))]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        own = super().get_command(ctx, cmd_name)
        entry = self._added().get(cmd_name) if own is None else None
        if entry is None:
            return own
        loaded = _load(entry)
        if isinstance(loaded, typer.Typer):
            group = typer.main.get_group(loaded)
            group.name = cmd_name
            return group
        added = typer.Typer(add_completion=False)
        added.command(cmd_name)(loaded)
        return typer.main.get_command(added)

    def _added(self) -> Mapping[str, EntryPoint]:
        owner = "" if self.is_root else self.name
        parts = [(entry, *entry.name.rpartition(".")) for entry in _entries()]
        return {name: entry for entry, group, _, name in parts if group == owner}


@cache
def _entries() -> Sequence[EntryPoint]:
    return tuple(entry_points(group="stagemesh.commands"))


def _load(entry: EntryPoint) -> Any:
    """Returns what adds a command. If it cannot be imported, returns a function that raises NotReadyError."""
    try:
        return entry.load()
    except Exception as exc:  # noqa: BLE001 - a package may raise anything, and the other commands need their help
        cause = exc

    def fail() -> None:
        """Unavailable: this command cannot be imported."""
        raise NotReadyError(
            f"the command {entry.name!r} cannot be imported from {entry.value!r}: {type(cause).__name__}: {cause}; "
            "correct or remove its package",
            reason="INVALID_DESCRIPTOR",
        ) from cause

    return fail
