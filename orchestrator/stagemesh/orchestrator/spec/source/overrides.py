"""Overrides for values of a pipeline file, such as `--set edges.*.connector=grpc`.

`*` matches every key or list index. An edge can be selected by its name instead of its list index. The values are YAML.
"""

from collections.abc import Iterator, Mapping
from typing import Any, cast

import yaml

from stagemesh.orchestrator.spec.source.document import Document
from stagemesh.orchestrator.spec.source.problem_lines import KeyPath, Origin

# Mappings that a file may omit.
_OPTIONAL_MAPPINGS = frozenset({"data_plane", "options", "limits", "per_caller", "chunk"})


def apply_overrides(document: Document, overrides: Mapping[str, str]) -> None:
    """Replaces values of the document. Reports an override that matches no key as a problem.

    `overrides` maps dotted keys, such as "edges.*.connector", to YAML values.
    """
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
            container[path[-1]] = value
            document.problems.origins[path] = origin
        if not places:
            _reject(document, origin, "the pipeline has no such key; see `stagemesh pipeline explain` for the keys")


def _reject(document: Document, origin: Origin, text: str) -> None:
    path: KeyPath = (origin.place,)
    document.problems.origins[path] = origin
    document.problems.add(path, text)


def _places(container: Any, names: list[str], path: KeyPath) -> Iterator[tuple[Any, KeyPath]]:
    """Yields, for each value that the key `names` matches, the mapping or list that contains it and its path."""
    name, *rest = names
    if isinstance(container, dict) and not rest and name != "*":
        yield container, (*path, name)
        return
    if isinstance(container, dict) and rest and name in _OPTIONAL_MAPPINGS:
        container.setdefault(name, {})
    for key in _matching(container, name):
        if rest:
            yield from _places(container[key], rest, (*path, key))
        else:
            yield container, (*path, key)


def _matching(container: Any, name: str) -> list[str | int]:
    if isinstance(container, dict):
        mapping = cast("dict[str, Any]", container)
        return list(mapping) if name == "*" else [name] if name in mapping else []
    items = cast("list[object]", container) if isinstance(container, list) else []
    return [i for i, item in enumerate(items) if name in ("*", str(i), _edge_name(item))]


def _edge_name(item: object) -> object:
    edge = cast("dict[str, object]", item) if isinstance(item, dict) else {}
    return edge.get("name") or f"{edge.get('from')}->{edge.get('to')}"


def _remove_origins_below(document: Document, path: KeyPath) -> None:
    for known in [known for known in document.problems.origins if known[: len(path)] == path]:
        del document.problems.origins[known]
