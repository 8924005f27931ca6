"""The YAML document of a pipeline file, and the problems found in it, each with its line and a remedy."""

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, NamedTuple, TypeAlias, cast

import yaml
from yaml.constructor import SafeConstructor
from yaml.resolver import Resolver

from stagemesh.common.errors import Finding, InvalidPipelineError
from stagemesh.common.plugins.descriptors import INPUT

KeyPath: TypeAlias = tuple[str | int, ...]
"""The keys and list indexes that lead from the root of the file to a value."""


@dataclass(frozen=True)
class Origin:
    """The place where a value of the pipeline was set, for error messages and for `stagemesh pipeline explain`."""

    line: int
    """The line number in the file, starting at 1. 0 if the value was not set in the file."""
    place: str
    """The place as the prefix of an error message, such as "file:line" or "--set KEY"."""
    label: str
    """The place as `stagemesh pipeline explain` shows it: "file:line", "variable X" or "override"."""


class Problems:
    """The errors found so far in a pipeline file, each with its line."""

    def __init__(self, origins: dict[KeyPath, Origin]) -> None:
        self.origins = origins
        """The origin of each value, by path. The empty path means the whole file. Default values have no origin."""
        self._found: list[Finding] = []
        self._paths = set[KeyPath]()

    def add(self, path: KeyPath, text: str) -> None:
        """Adds an error in the value at `path`. Ignores an error that was already added.

        `text` has the form "error; remedy".
        """
        origin = self._nearest_origin(path)
        self._paths.add(path)
        known = {(finding.place, finding.message) for finding in self._found}
        if (origin.place, text) not in known:
            self._found.append(Finding(origin.place, origin.line, dotted(path), text))

    def has(self, path: KeyPath) -> bool:
        """Returns whether an error was added for exactly this path, not for a value above or below it."""
        return path in self._paths

    def raise_any(self) -> None:
        """Raises InvalidPipelineError if any error was added.

        The message has one line for each error, in ascending order of the line numbers in the file.
        """
        if self._found:
            raise _invalid(sorted(self._found, key=lambda finding: finding.line))

    def _nearest_origin(self, path: KeyPath) -> Origin:
        """Returns the origin of the value at a path, or of the closest enclosing value that has an origin.

        Skips elements of the path that are not in the file, such as tags that pydantic inserts.
        """
        reached: KeyPath = ()
        for element in path:
            if (*reached, element) in self.origins:
                reached = (*reached, element)
        return self.origins[reached]


def invalid_line(file: str, line: int, text: str) -> InvalidPipelineError:
    """Returns the error for a file that cannot be parsed beyond a line. `text` has the form "error; remedy"."""
    return _invalid([Finding(f"{file}:{line}", line, "", text)])


def _invalid(findings: Sequence[Finding]) -> InvalidPipelineError:
    error = InvalidPipelineError("\n".join(f"{finding.place}: {finding.message}" for finding in findings))
    error.findings = findings
    return error


def suggest(name: str, known: Collection[str]) -> str:
    """Returns a remedy for an unknown name: the most similar name in `known`.

    If no name in `known` is similar, the remedy lists all of them.
    """
    close = get_close_matches(name, known, n=1)
    if close:
        return f"did you mean {close[0]!r}?"
    return f"known: {', '.join(sorted(known)) or 'none'}"


def dotted(path: KeyPath) -> str:
    """Formats a path as a dotted key, for example "edges.0.connector"."""
    return ".".join(map(str, path))


_REFERENCE = re.compile(r"\$(?P<escape>\$?)\{(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?::-(?P<default>[^}\n]*))?\}")
# Marks consist of private-use characters, because YAML allows these everywhere in plain scalars.
_MARK = re.compile("\ue000(\\d+)\ue001")
_SCALAR_TAGS = frozenset(f"tag:yaml.org,2002:{kind}" for kind in ("str", "int", "float", "bool", "null"))
# Mappings that a file may omit.
_OPTIONAL_MAPPINGS = frozenset({"data_plane", "options", "limits", "per_caller", "chunk"})


class Document(NamedTuple):
    """The content of a pipeline file, and the problems found so far.

    `problems` also contains the line of each value. `references` contains the original text of each scalar with
    references to variables, by path.
    """

    values: dict[str, object]
    problems: Problems
    references: dict[KeyPath, str]

    def as_written(self) -> dict[str, object]:
        """Returns the content with references to variables instead of the values of the variables.

        If the content is read as a pipeline file with the same variables, the result has the same values.
        """
        return {key: self._as_written(value, (key,)) for key, value in self.values.items()}

    def _as_written(self, value: Any, path: KeyPath) -> object:
        match value:
            case dict():
                mapping = cast("dict[str, object]", value)
                return {key: self._as_written(item, (*path, key)) for key, item in mapping.items()}
            case list():
                items = cast("list[object]", value)
                return [self._as_written(item, (*path, index)) for index, item in enumerate(items)]
            case str():
                # Overrides contain no references, but may contain text that looks like one.
                return self.references.get(path) or _REFERENCE.sub(r"$\g<0>", value)
            case _:
                return self.references.get(path, value)


def read_document(text: str, *, file: str, variables: Mapping[str, str]) -> Document:
    """Parses the text of a pipeline file, or of a values file that contains one.

    `file` is the path for error messages. `variables` are the values for references to variables, by name. Raises
    InvalidPipelineError if the text is not a YAML mapping.
    """
    reader = _Reader(file, variables)
    try:
        root = yaml.compose(reader.mark_references(text), Loader=yaml.SafeLoader)
    except yaml.YAMLError as exc:
        raise _syntax_error(exc, file=file) from exc
    if not isinstance(root, yaml.MappingNode):
        raise invalid_line(file, 1, "the file does not contain a mapping; begin with `pipeline: NAME` and `stages:`")
    return Document(reader.read_file(root), reader.problems, reader.references)


def referenced_variables(text: str) -> tuple[str, ...]:
    """Returns the names of the variables to which the text of a pipeline file refers, in alphabetical order."""
    return tuple(sorted({match["name"] for match in _REFERENCE.finditer(text) if not match["escape"]}))


def _syntax_error(exc: yaml.YAMLError, *, file: str) -> InvalidPipelineError:
    mark = exc.problem_mark if isinstance(exc, yaml.MarkedYAMLError) else None
    problem = exc.problem if isinstance(exc, yaml.MarkedYAMLError) else str(exc)
    line = mark.line + 1 if mark else 1
    return invalid_line(file, line, f"invalid YAML: {problem}; correct this line or the one before it")


# PyYAML's annotations lack the types of these two methods.
def _implicit_tag(text: str) -> str:
    resolve = cast("Callable[[type[yaml.Node], str, tuple[bool, bool]], str]", Resolver().resolve)  # pyright: ignore[reportUnknownMemberType]
    return resolve(yaml.ScalarNode, text, (True, False))


def _construct(node: yaml.ScalarNode) -> object:
    construct = cast("Callable[[yaml.Node], object]", SafeConstructor().construct_object)  # pyright: ignore[reportUnknownMemberType]
    return construct(node)


class _Reader:
    def __init__(self, file: str, variables: Mapping[str, str]) -> None:
        self._file, self._variables = file, variables
        self._matches: list[re.Match[str]] = []
        self._open_nodes: list[yaml.Node] = []
        self._origins: dict[KeyPath, Origin] = {(): self._origin(1)}
        self.problems = Problems(self._origins)
        self.references: dict[KeyPath, str] = {}

    def mark_references(self, text: str) -> str:
        """Replaces each reference to a variable in the file's text with a mark, and returns the new text."""
        return _REFERENCE.sub(self._mark, text)

    def read_file(self, root: yaml.MappingNode) -> dict[str, object]:
        """Returns the values of the pipeline file, which is either the whole YAML mapping or its value `pipeline`."""
        for key, value in root.value:
            if key.value == "pipeline" and isinstance(value, yaml.MappingNode):
                self._origins[()] = self._origin(key.start_mark.line + 1)
                return self._read_mapping(value, ())
        return self._read_mapping(root, ())

    def _read_mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, object]:
        """Returns the values of the YAML mapping at `path`, by key.

        Reports a repeated key as a problem, and uses the last value of the key.
        """
        values: dict[str, object] = {}
        for key_node, value_node in node.value:
            key = str(key_node.value)
            here = (*path, key)
            first = self._origins[here] if key in values else None
            self._origins[here] = self._origin(key_node.start_mark.line + 1)
            if first is not None:
                self.problems.add(here, f"{dotted(here)} is given twice (first on line {first.line}); keep one")
            values[key] = self._read(value_node, here)
        return values

    def _mark(self, reference: re.Match[str]) -> str:
        self._matches.append(reference)
        return f"\ue000{len(self._matches) - 1}\ue001"

    def _read(self, node: yaml.Node, path: KeyPath) -> object:
        if isinstance(node, yaml.ScalarNode):
            return self._read_scalar(node, path)
        if any(node is other for other in self._open_nodes):
            self.problems.add(path, f"{dotted(path)} contains itself; write it without the alias")
            return None
        self._open_nodes.append(node)
        try:
            return self._read_mapping(node, path) if isinstance(node, yaml.MappingNode) else self._read_list(node, path)
        finally:
            self._open_nodes.pop()

    def _read_list(self, node: yaml.Node, path: KeyPath) -> list[object]:
        values: list[object] = []
        for index, item in enumerate(node.value):
            self._origins[*path, index] = self._origin(item.start_mark.line + 1)
            values.append(self._read(item, (*path, index)))
        return values

    def _read_scalar(self, node: yaml.ScalarNode, path: KeyPath) -> object:
        text = self._fill_in(node.value, path)
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

    def _fill_in(self, text: str, path: KeyPath) -> str:
        """Returns the text of the scalar at `path`, with each mark replaced by the text for its reference.

        If the text contains marks, records its original form. If values of variables are used, adds the names of these
        variables to the origin of the scalar.
        """
        names: list[str] = []
        filled = _MARK.sub(lambda mark: self._value(self._matches[int(mark[1])], path, names=names), text)
        if _MARK.search(text):
            self.references[path] = _MARK.sub(lambda mark: self._matches[int(mark[1])][0], text)
        if names:
            label = ", ".join(f"variable {name}" for name in names)
            origin = self._origins[path]
            self._origins[path] = Origin(origin.line, f"{origin.place} ({label})", label)
        return filled

    def _value(self, reference: re.Match[str], path: KeyPath, *, names: list[str]) -> str:
        """Returns the text that replaces a reference: the value of the variable, or the reference's default.

        Adds the name of the variable to `names` if the variable's value is used. Reports a problem at `path` if the
        variable is not set and the reference has no default.
        """
        name, default = reference["name"], reference["default"]
        if reference["escape"]:
            return reference[0][1:]
        # As in a shell, an empty variable counts as unset if the reference has a default.
        if value := self._variables.get(name):
            names.append(name)
            return value
        if default is None and name not in self._variables:
            self.problems.add(path, f"variable {name} is not set; set it, or write ${{{name}:-default}}")
        return default or ""

    def _origin(self, line: int) -> Origin:
        place = f"{self._file}:{line}"
        return Origin(line, place, place)


def apply_overrides(document: Document, overrides: Mapping[str, str]) -> None:
    """Replaces values of the document. Reports a problem for each override that matches no key or is not valid YAML.

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
            _forget_below(document, path)
            container[path[-1]] = value
            document.problems.origins[path] = origin
        if not places:
            _reject(document, origin, "the pipeline has no such key; see `stagemesh pipeline explain` for the keys")


def _reject(document: Document, origin: Origin, text: str) -> None:
    path: KeyPath = (origin.place,)
    document.problems.origins[path] = origin
    document.problems.add(path, text)


def _places(container: Any, names: list[str], path: KeyPath) -> Iterator[tuple[Any, KeyPath]]:
    """Yields a pair for each value that a dotted key matches: the value's container and the value's path.

    The container is a mapping or list. `names` are the parts of the key below `container`. `path` is the path of
    `container`. Creates optional mappings that are missing.
    """
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
    return [i for i, item in enumerate(items) if name in (_wildcard(item), str(i), _edge_name(item))]


def _wildcard(item: object) -> str | None:
    """Returns the wildcard that matches an item, or None if no wildcard does."""
    return None if isinstance(item, dict) and cast("dict[str, object]", item).get("from") == INPUT else "*"


def _edge_name(item: object) -> object:
    edge = cast("dict[str, object]", item) if isinstance(item, dict) else {}
    return edge.get("name") or f"{edge.get('from')}->{edge.get('to')}"


def _forget_below(document: Document, path: KeyPath) -> None:
    for recorded in (document.problems.origins, document.references):
        for known in [known for known in recorded if known[: len(path)] == path]:
            del recorded[known]
