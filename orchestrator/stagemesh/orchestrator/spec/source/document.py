"""Parses a pipeline file as YAML, and records the line of every value."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import cast

import yaml
from yaml.constructor import SafeConstructor
from yaml.resolver import Resolver

from stagemesh.common.errors import InvalidPipelineError
from stagemesh.orchestrator.spec.checks.problems import Problems
from stagemesh.orchestrator.spec.source.origins import KeyPath, Origin, Origins, dotted
from stagemesh.orchestrator.spec.source.variables import References

_SCALAR_TAGS = frozenset(f"tag:yaml.org,2002:{kind}" for kind in ("str", "int", "float", "bool", "null"))


@dataclass
class Document:
    """The content of a pipeline file, the origin of each value, and the problems found so far."""

    values: dict[str, object]
    origin_by_path: dict[KeyPath, Origin]
    problems: Problems


def read_document(text: str, *, file: str, variables: Mapping[str, str]) -> Document:
    """Parses the text of a pipeline file. `file` is the path for error messages.

    Raises InvalidPipelineError if the text is not a YAML mapping.
    """
    references = References(variables)
    try:
        root = yaml.compose(references.take_out(text), Loader=yaml.SafeLoader)
    except yaml.YAMLError as exc:
        raise _syntax_error(exc, file=file) from exc
    if not isinstance(root, yaml.MappingNode):
        raise InvalidPipelineError(
            f"{file}:1: the file does not contain a mapping; begin with `pipeline: NAME` and `stages:`"
        )
    reader = _Reader(file=file, references=references)
    values = reader.read_mapping(root, ())
    return Document(values, reader.origins, reader.problems)


def _syntax_error(exc: yaml.YAMLError, *, file: str) -> InvalidPipelineError:
    mark = exc.problem_mark if isinstance(exc, yaml.MarkedYAMLError) else None
    problem = exc.problem if isinstance(exc, yaml.MarkedYAMLError) else str(exc)
    line = mark.line + 1 if mark else 1
    return InvalidPipelineError(f"{file}:{line}: invalid YAML: {problem}; correct this line or the one before it")


# PyYAML's annotations lack the types of these two methods.
def _implicit_tag(text: str) -> str:
    resolve = cast("Callable[[type[yaml.Node], str, tuple[bool, bool]], str]", Resolver().resolve)  # pyright: ignore[reportUnknownMemberType]
    return resolve(yaml.ScalarNode, text, (True, False))


def _construct(node: yaml.ScalarNode) -> object:
    construct = cast("Callable[[yaml.Node], object]", SafeConstructor().construct_object)  # pyright: ignore[reportUnknownMemberType]
    return construct(node)


@dataclass
class _Reader:
    file: str
    references: References
    origins: dict[KeyPath, Origin] = field(default_factory=dict[KeyPath, Origin])
    open_nodes: list[yaml.Node] = field(default_factory=list[yaml.Node])

    def __post_init__(self) -> None:
        self.origins[()] = self._origin(1)
        self.problems = Problems(Origins(self.origins))

    def read_mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, object]:
        """Returns the values of a YAML mapping. Reports a repeated key as a problem, and uses the key's last value."""
        values: dict[str, object] = {}
        for key_node, value_node in node.value:
            key = str(key_node.value)
            line = key_node.start_mark.line + 1
            if key in values:
                first = self.origins[*path, key].line
                self.origins[*path, key] = self._origin(line)
                self.problems.add(
                    (*path, key), f"{dotted((*path, key))} is given twice (first on line {first}); keep one"
                )
            self.origins[*path, key] = self._origin(line)
            values[key] = self._read(value_node, (*path, key))
        return values

    def _read(self, node: yaml.Node, path: KeyPath) -> object:
        if isinstance(node, yaml.ScalarNode):
            return self._read_scalar(node, path)
        if any(node is other for other in self.open_nodes):
            self.problems.add(path, f"{dotted(path)} contains itself; write it without the alias")
            return None
        self.open_nodes.append(node)
        try:
            return self.read_mapping(node, path) if isinstance(node, yaml.MappingNode) else self._read_list(node, path)
        finally:
            self.open_nodes.pop()

    def _read_list(self, node: yaml.Node, path: KeyPath) -> list[object]:
        values: list[object] = []
        for index, item in enumerate(node.value):
            self.origins[*path, index] = self._origin(item.start_mark.line + 1)
            values.append(self._read(item, (*path, index)))
        return values

    def _read_scalar(self, node: yaml.ScalarNode, path: KeyPath) -> object:
        filled = self.references.fill_in(node.value)
        for name in filled.missing:
            self.problems.add(path, f"variable {name} is not set; set it, or write ${{{name}:-default}}")
        if filled.names:
            label = ", ".join(f"variable {name}" for name in filled.names)
            origin = self.origins[path]
            self.origins[path] = Origin(origin.line, f"{origin.place} ({label})", label)
        return self._typed(node, filled.text, path)

    def _typed(self, node: yaml.ScalarNode, text: str, path: KeyPath) -> object:
        tag = str(node.tag)
        if text != node.value and node.style is None:
            # The value determines the type of a plain scalar; the reference to a variable does not.
            tag = _implicit_tag(text)
        if tag not in _SCALAR_TAGS:
            return text
        try:
            return _construct(yaml.ScalarNode(tag, text))
        except (yaml.YAMLError, ValueError) as exc:
            self.problems.add(path, f"{dotted(path)} is not a valid {tag.rpartition(':')[2]}: {exc}; correct it")
            return text

    def _origin(self, line: int) -> Origin:
        place = f"{self.file}:{line}"
        return Origin(line, place, place)
