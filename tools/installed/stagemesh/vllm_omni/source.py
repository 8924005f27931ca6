"""Reads both forms of vLLM-Omni's configs: stage configs (`stage_args`) and deploy configs (`stages`).

The keys of a stage may be nested (`engine_args`, `runtime`, `engine_extras`) or flat. They are read as one section per
stage, in which each value has its path in the config.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar, cast

import yaml
from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from stagemesh.common.errors import InvalidRequestError

_Value = TypeVar("_Value")
_Key = TypeVar("_Key", int, str)
_Id = Annotated[int, Field(strict=True, ge=0)]
_Mapping = dict[str, JsonValue]


class _Shape(BaseModel):
    model_config = ConfigDict(extra="allow")


class _StageShape(_Shape):
    stage_id: _Id
    engine_args: _Mapping | None = None
    engine_extras: _Mapping | None = None
    runtime: _Mapping | None = None
    default_sampling_params: _Mapping | None = None
    parallel_config: _Mapping | None = None
    cache_config: _Mapping | None = None
    input_connectors: dict[str, str] | None = None
    output_connectors: dict[str, str] | None = None
    engine_input_source: list[_Id] | None = None
    final_output: Annotated[bool, Field(strict=True)] | None = None


class _EdgeShape(_Shape):
    producer: Annotated[_Id, Field(validation_alias="from")]
    consumer: Annotated[_Id, Field(validation_alias="to")]


class _ConnectorShape(_Shape):
    name: str | None = None
    """It may be in the base of an overlay."""
    extra: _Mapping | None = None


class _GraphShape(_Shape):
    connectors: dict[str, _ConnectorShape] | None = None
    edges: list[_EdgeShape] | None = None


class _RuntimeShape(_GraphShape):
    defaults: _Mapping | None = None


class _StageFile(_Shape):
    stages: Annotated[list[_StageShape], Field(min_length=1, validation_alias="stage_args")]
    runtime: _RuntimeShape | None = None


class _OverlayFile(_GraphShape):
    stages: list[_StageShape]


class _DeployFile(_OverlayFile):
    stages: Annotated[list[_StageShape], Field(min_length=1)]


_UNPREFIXED = frozenset({"engine_args", "engine_extras", "runtime"})
"""The mappings whose keys are keys of the stage."""
_PREFIXED = frozenset(
    {
        "cache_config",
        "default_sampling_params",
        "defaults",
        "extra",
        "input_connectors",
        "output_connectors",
        "parallel_config",
        "platforms",
    }
)
"""The mappings whose keys are read one by one, with the name of the mapping before them."""
_REPLACED = frozenset({"cache_config", "input_connectors", "output_connectors", "parallel_config"})
"""The mappings of a stage that an overlay replaces as a whole. Its `_PREFIXED` mappings with other names are merged."""
_DEEP = frozenset({"engine_args", "engine_extras", "extra"})
"""The mappings whose values an overlay merges key by key, in every depth."""


class Given(NamedTuple):
    """A value of the config, and its path."""

    path: str
    value: Any
    is_deep: bool = False
    """Whether an overlay merges the keys of the value, if it is a mapping."""

    def override(self, other: "Given") -> "Given":
        """Returns the value of an overlay, with the keys of this one that the overlay does not have."""
        return other._replace(value=_merge(self.value, other.value)) if self.is_deep and other.is_deep else other


def _merge(value: object, other: object) -> object:
    if not (isinstance(value, dict) and isinstance(other, dict)):
        return other
    mine, theirs = cast("dict[str, object]", value), cast("dict[str, object]", other)
    return {**mine, **{key: _merge(mine[key], each) if key in mine else each for key, each in theirs.items()}}


@dataclass
class Section:
    """The keys of a stage, an edge, a connector or the file that have not been converted yet."""

    path: str
    values: dict[str, Given] = field(default_factory=dict[str, Given])
    shadowed: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    """The paths of values that another value replaces, each with the path of that value."""

    def add(self, name: str, given: Given) -> None:
        """Adds a value. Replaces and records another value of the same name. Ignores a null value."""
        if given.value is None:
            return
        if name in self.values:
            self.shadowed.append((self.values[name].path, given.path))
        self.values[name] = given

    def take(self, name: str, kind: type[_Value]) -> _Value | None:
        """Removes a value and returns it, or None if it is absent.

        Raises InvalidRequestError (INVALID_CONFIG) if the value is not of type `kind`.
        """
        given = self.values.pop(name, None)
        if given is None:
            return None
        # A bool is an int in Python, but not in a config.
        if not isinstance(given.value, kind) or (isinstance(given.value, bool) and kind is not bool):
            expected = {"str": "text", "int": "a whole number", "bool": "true or false"}.get(
                kind.__name__, kind.__name__
            )
            raise _invalid([f"{given.path} is {given.value!r}; write {expected}"])
        return given.value

    def take_ids(self, name: str) -> list[int]:
        """Removes a list of stages' ids and returns it. Returns an empty list if it is absent."""
        given = self.values.pop(name, None)
        # pydantic has checked the items.
        return [] if given is None else given.value

    def where(self, name: str) -> str:
        """Returns the path of a value that has not been taken, or the path that it would have."""
        return self.values[name].path if name in self.values else f"{self.path}.{name}"

    def below(self, prefix: str) -> Mapping[str, Given]:
        """Returns the values of the mapping `prefix` by key, without removing them."""
        start = f"{prefix}."
        return {name.removeprefix(start): given for name, given in self.values.items() if name.startswith(start)}

    def override(self, other: "Section") -> None:
        """Merges the section of an overlay into this one. Values of the overlay replace values of this section."""
        replaced = {name.partition(".")[0] for name, given in other.values.items() if not given.is_deep} & _REPLACED
        for name in [name for name in self.values if name.partition(".")[0] in replaced]:
            del self.values[name]
        for name, given in other.values.items():
            self.values[name] = self.values[name].override(given) if name in self.values else given
        self.shadowed += other.shadowed
        self.path = other.path


class OmniEdge(NamedTuple):
    """An item of `edges`."""

    producer: int
    consumer: int
    section: Section


@dataclass
class OmniConfig:
    """The content of a config of either form."""

    file: Path
    """The file, or the last one of the files that `base_config` names."""
    is_deploy: bool
    """Whether the config is a deploy config. Its graph of stages is part of vLLM-Omni's code, not of the file."""
    stages: dict[int, Section]
    edges: list[OmniEdge]
    connectors: dict[str, Section]
    top: Section
    """The keys that belong to the whole file."""

    def override(self, other: "OmniConfig") -> None:
        """Merges an overlay into this config."""
        _override_each(self.stages, other.stages)
        _override_each(self.connectors, other.connectors)
        self.edges = other.edges or self.edges
        self.top.override(other.top)


def read_config(file: Path) -> OmniConfig:
    """Reads a config, merged with the configs that `base_config` names.

    Raises InvalidRequestError (INVALID_CONFIG) if a file cannot be read, is not a config of vLLM-Omni, has a stage
    without an id, repeats an id, or refers to a stage or connector that it does not define. The message has a line for
    each mistake.
    """
    return _read(file, prefix="", bases=())


def _read(file: Path, *, prefix: str, bases: tuple[Path, ...]) -> OmniConfig:
    document = _load(file)
    overlay = document.pop("base_config", None) if "stage_args" not in document else None
    if overlay is not None and not isinstance(overlay, str):
        raise _invalid([f"{prefix}base_config is {overlay!r}; write the path of a file"])
    config = _parse(document, file=file, prefix=prefix, is_overlay=overlay is not None)
    if overlay is None:
        return _with_names(config)
    path = (file.parent / overlay).resolve()
    if path in bases:
        raise _invalid([f"{prefix}base_config: {path} is its own base; name another file"])
    base = _read(path, prefix=f"{overlay}: ", bases=(*bases, path))
    if not base.is_deploy:
        raise _invalid([f"{prefix}base_config: {path} is not a deploy config; name a file with `stages`"])
    base.override(config)
    return _with_names(base)


def _with_names(config: OmniConfig) -> OmniConfig:
    """Returns the config. Raises InvalidRequestError if a connector has no name, in an overlay or in its base."""
    nameless = [each.path for each in config.connectors.values() if "name" not in each.values]
    if nameless:
        raise _invalid([f"{path}.name: it is missing; add it" for path in nameless])
    return config


def _load(file: Path) -> dict[str, Any]:
    try:
        document = _escape(yaml.safe_load(file.read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError) as exc:
        raise _invalid([f"{file} cannot be read: {exc}; name a text file in UTF-8"]) from exc
    except RecursionError as exc:
        raise _invalid([f"{file} contains itself by an alias, or is nested too deeply; write it without"]) from exc
    except yaml.YAMLError as exc:
        raise _invalid([f"{file} is not valid YAML: {' '.join(str(exc).split())}; correct it"]) from exc
    if not isinstance(document, dict) or not document.keys() & {"stage_args", "stages", "base_config"}:
        text = "it has neither `stage_args` nor `stages`; name a stage config or a deploy config"
        raise _invalid([f"{file} is not a config of vLLM-Omni: {text}"])
    mapping = cast("dict[str, Any]", document)
    if isinstance(mapping.get("stages"), dict):
        raise _invalid([f"{file} is a pipeline file of Stagemesh already; use it with `stagemesh up`"])
    return mapping


def _escape(value: object) -> object:
    """Returns a value of the config so that a pipeline file contains the same text.

    A pipeline file would replace ${NAME} by the value of a variable.
    """
    match value:
        case str():
            return value.replace("${", "$${")
        case dict():
            return {key: _escape(item) for key, item in cast("dict[object, object]", value).items()}
        case list():
            return [_escape(item) for item in cast("list[object]", value)]
        case _:
            return value


def _parse(document: dict[str, Any], *, file: Path, prefix: str, is_overlay: bool) -> OmniConfig:
    if is_overlay and not document.get("stages"):
        document = {**document, "stages": []}
    is_deploy = "stage_args" not in document
    shape = _OverlayFile if is_overlay else _DeployFile if is_deploy else _StageFile
    try:
        parsed = shape.model_validate(document)
    except ValidationError as exc:
        errors = exc.errors(include_url=False)
        mistakes = [f"{prefix}{_joined(each['loc'])}: {_describe(each['type'], each['msg'])}" for each in errors]
        raise _invalid(mistakes) from exc
    top = _section(prefix.strip(), parsed, skip=("stages", "runtime", "connectors", "edges"))
    if isinstance(parsed, _StageFile):
        graph: _GraphShape = parsed.runtime or _RuntimeShape()
        graph_path = "runtime."
        top.values |= _section("runtime", graph, skip=("connectors", "edges")).values
    else:
        graph, graph_path = parsed, prefix
    edges = [
        OmniEdge(edge.producer, edge.consumer, _section(f"{graph_path}edges[{index}]", edge))
        for index, edge in enumerate(graph.edges or ())
    ]
    connectors = {
        name: _section(f"{graph_path}connectors.{name}", each) for name, each in (graph.connectors or {}).items()
    }
    stages = _read_stages(parsed.stages, f"{prefix}{'stages' if is_deploy else 'stage_args'}")
    return OmniConfig(file, is_deploy, stages, edges, connectors, top)


def _read_stages(shapes: Iterable[_StageShape], path: str) -> dict[int, Section]:
    sections: dict[int, Section] = {}
    mistakes: list[str] = []
    for index, shape in enumerate(shapes):
        section = _section(f"{path}[{index}]", shape, skip=("stage_id",))
        if shape.stage_id in sections:
            first = sections[shape.stage_id].path
            mistakes.append(
                f"{section.path}.stage_id is {shape.stage_id}, the id of {first}; give each stage its own id"
            )
        sections[shape.stage_id] = section
    if mistakes:
        raise _invalid(mistakes)
    return sections


def _section(path: str, shape: BaseModel, *, skip: tuple[str, ...] = ()) -> Section:
    values = shape.model_dump(exclude_unset=True)
    section = Section(path)
    kept = {key: value for key, value in values.items() if key not in {*skip, "producer", "consumer"}}
    for name, given in _flatten(kept, path):
        section.add(name, given)
    return section


def _flatten(values: Mapping[str, Any], path: str, *, is_deep: bool = False) -> Iterator[tuple[str, Given]]:
    for key, value in values.items():
        here = f"{path}.{key}" if path and not path.endswith(":") else f"{path} {key}".lstrip()
        deep = is_deep or key in _DEEP
        if isinstance(value, dict) and key in _UNPREFIXED:
            yield from _flatten(cast("dict[str, Any]", value), here, is_deep=deep)
        elif isinstance(value, dict) and key in _PREFIXED:
            for name, item in cast("dict[str, Any]", value).items():
                yield f"{key}.{name}", Given(f"{here}.{name}", item, deep)
        else:
            yield key, Given(here, value, deep)


def _override_each(sections: dict[_Key, Section], others: dict[_Key, Section]) -> None:
    for key, section in others.items():
        if key in sections:
            sections[key].override(section)
        else:
            sections[key] = section


def _joined(location: tuple[int | str, ...]) -> str:
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location)
    return text.removeprefix(".") or "the file"


def _describe(kind: str, message: str) -> str:
    if kind == "missing":
        return "it is missing; add it"
    return f"{message[:1].lower()}{message[1:]}; correct it"


def _invalid(mistakes: list[str]) -> InvalidRequestError:
    return InvalidRequestError("\n".join(mistakes), reason="INVALID_CONFIG")
