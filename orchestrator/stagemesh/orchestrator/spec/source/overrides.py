"""Values that are set from outside the file, such as `--set edges.*.connector=grpc`.

`*` stands for every key or list position. The name of an edge may replace its list position. Values are YAML.
"""

from collections.abc import Iterator, Mapping
from typing import cast

import yaml

from stagemesh.orchestrator.spec.source.document import Document
from stagemesh.orchestrator.spec.source.origins import KeyPath, Origin

# Mappings that a file may omit.
_OPTIONAL_MAPPINGS = frozenset({"data_plane", "options", "limits", "per_caller", "chunk"})


def apply_overrides(document: Document, overrides: Mapping[str, str]) -> None:
    """Sets each value in the document. An override that matches no key becomes a problem."""
    for key, text in overrides.items():
        origin = Origin(0, f"--set {key}", "override")
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError as exc:
            _reject(document, origin, f"{text!r} is not valid YAML ({exc}); quote it")
            continue
        places = list(_places(document.values, key.split("."), ()))
        for container, path in places:
            _remove_origins_below(document, path)
            _put(container, path[-1], value)
            document.origin_by_path[path] = origin
        if not places:
            _reject(document, origin, "the pipeline has no such key; see `stagemesh pipeline explain` for the keys")


def _reject(document: Document, origin: Origin, text: str) -> None:
    path: KeyPath = (origin.place,)
    document.origin_by_path[path] = origin
    document.problems.add(path, text)


def _places(container: object, names: list[str], path: KeyPath) -> Iterator[tuple[object, KeyPath]]:
    """Yields the containers of the values that `names` match, each with the value's path."""
    name, *rest = names
    mapping = _as_mapping(container)
    if mapping is not None and not rest and name != "*":
        yield container, (*path, name)
        return
    if mapping is not None and rest and name in _OPTIONAL_MAPPINGS:
        mapping.setdefault(name, {})
    for key in _matching(container, name):
        if rest:
            yield from _places(_get(container, key), rest, (*path, key))
        else:
            yield container, (*path, key)


def _as_mapping(container: object) -> dict[str, object] | None:
    return cast("dict[str, object]", container) if isinstance(container, dict) else None


def _matching(container: object, name: str) -> list[str | int]:
    if isinstance(container, dict):
        keys = cast("dict[str, object]", container)
        return list(keys) if name == "*" else [name] if name in keys else []
    if isinstance(container, list):
        items = cast("list[object]", container)
        return [i for i, item in enumerate(items) if name in ("*", str(i), _edge_name(item))]
    return []


def _edge_name(item: object) -> object:
    if not isinstance(item, dict):
        return None
    edge = cast("dict[str, object]", item)
    return edge.get("name") or f"{edge.get('from')}->{edge.get('to')}"


def _get(container: object, key: str | int) -> object:
    return cast("dict[str | int, object]", container)[key]


def _put(container: object, key: str | int, value: object) -> None:
    cast("dict[str | int, object]", container)[key] = value


def _remove_origins_below(document: Document, path: KeyPath) -> None:
    for known in [known for known in document.origin_by_path if known[: len(path)] == path]:
        del document.origin_by_path[known]
