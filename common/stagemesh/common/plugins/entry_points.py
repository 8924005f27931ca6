"""Finds the descriptors of engines, functions, transforms and codec models by their entry points.

Packages register descriptors in the groups `stagemesh.engines`, `stagemesh.functions`, `stagemesh.transforms` and
`stagemesh.codec_models`.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar

from stagemesh.common.errors import NotFoundError, NotReadyError
from stagemesh.common.plugins.descriptors import (
    CodecModelDescriptor,
    EngineDescriptor,
    FunctionDescriptor,
    TransformDescriptor,
)

_Descriptor = TypeVar("_Descriptor", EngineDescriptor, FunctionDescriptor, TransformDescriptor, CodecModelDescriptor)


_GROUPS = {
    EngineDescriptor: "stagemesh.engines",
    FunctionDescriptor: "stagemesh.functions",
    TransformDescriptor: "stagemesh.transforms",
    CodecModelDescriptor: "stagemesh.codec_models",
}
_UNKNOWN_REASONS = {
    EngineDescriptor: "UNKNOWN_ENGINE",
    FunctionDescriptor: "UNKNOWN_FUNCTION",
    TransformDescriptor: "UNKNOWN_TRANSFORM",
    CodecModelDescriptor: "UNKNOWN_FUNCTION",
}


@cache
def _names(group: str, _path: tuple[str, ...]) -> Mapping[str, Sequence[EntryPoint]]:
    """Returns the different entry points of the packages on `sys.path`, by name. Each name should have only one."""
    found: dict[str, list[EntryPoint]] = {}
    for entry in entry_points(group=group):
        same_name = found.setdefault(entry.name, [])
        # A package may be found twice, for example if it is also on PYTHONPATH.
        if entry.value not in [each.value for each in same_name]:
            same_name.append(entry)
    return found


def load_descriptor(kind: type[_Descriptor], name: str) -> _Descriptor:
    """Returns the descriptor `name` of this kind.

    Raises NotFoundError, which lists all names of the kind, if the name is unknown. Raises NotReadyError
    (INVALID_DESCRIPTOR) if its package is broken, or if several packages register the name.
    """
    group = _GROUPS[kind]
    known = _names(group, tuple(sys.path))
    noun = group.removeprefix("stagemesh.").removesuffix("s").replace("_", " ")
    if name not in known:
        raise NotFoundError(
            f"unknown {noun} {name!r}; known: {', '.join(sorted(known)) or 'none'}", reason=_UNKNOWN_REASONS[kind]
        )
    entry, *others = known[name]
    if others:
        packages = " and ".join(map(_package_of, known[name]))
        raise _broken(f"{noun} {name!r} is registered more than once, by {packages}; remove one of them")
    where = f"{noun} {name!r} of {_package_of(entry)}"
    try:
        descriptor = entry.load()
    except Exception as exc:
        text = f"{where}: entry point {entry.value!r} cannot be loaded: {type(exc).__name__}: {exc}"
        raise _broken(
            f"{text}; install the package again if its entry points have changed, correct it, or remove it"
        ) from exc
    if not isinstance(descriptor, kind):
        raise _broken(f"{where}: {entry.value} is {type(descriptor).__name__}; it must be a {kind.__name__}")
    return descriptor


def _package_of(entry: EntryPoint) -> str:
    return f"package {entry.dist.name} {entry.dist.version}" if entry.dist is not None else "an unknown package"


def _broken(message: str) -> NotReadyError:
    return NotReadyError(message, reason="INVALID_DESCRIPTOR")


def load_descriptors(kind: type[_Descriptor]) -> Sequence[_Descriptor]:
    """Returns all descriptors of this kind."""
    return [load_descriptor(kind, name) for name in _names(_GROUPS[kind], tuple(sys.path))]


def import_factory(path: str) -> Callable[..., Any]:
    """Imports and returns the callable at `path`, which has the form "module:attribute"."""
    module, _, attribute = path.partition(":")
    return getattr(import_module(module), attribute)  # type: ignore[no-any-return]


def factory_problem(path: str, *, methods: Sequence[str]) -> str:
    """Imports the factory at `path`. Returns what is wrong with it, or "" if nothing is.

    A factory that is a class must have `methods`.
    """
    try:
        factory = import_factory(path)
    except Exception as exc:  # noqa: BLE001  # the module may raise anything
        return f"its factory {path!r} cannot be imported: {type(exc).__name__}: {exc}"
    if not callable(factory):
        return f"its factory {path!r} is {type(factory).__name__}, which cannot be called"
    # Not `hasattr`, because each class can be called.
    defined = {name for base in factory.__mro__ for name in vars(base)} if isinstance(factory, type) else set(methods)
    missing = [name for name in methods if name not in defined]
    return f"its factory {path!r} lacks the methods {', '.join(missing)}" if missing else ""
