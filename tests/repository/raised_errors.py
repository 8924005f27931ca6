"""Finds the errors that the product's code raises, from its syntax trees."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from stagemesh.common import errors
from tests.repository.commands import ROOT, SOURCES

UPPER = re.compile(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)*")
# The statuses of gRPC and of proxies have no reason. Errors that are made of them have the reason of their class.
_FOREIGN_STATUSES = "rpc.error_mapping"
_BASE = "common.errors"
# The part that raises the errors of a package. The longest prefix counts. Shared packages are raised by any part.
_SOURCES = {
    "bench": "command",
    "cli": "command",
    "client": "client",
    "connectors": "data plane",
    "fake_engine": "stage",
    "jobs": "job server",
    "orchestrator": "orchestrator",
    "pipeline": "command",
    "services": "stage",
    "services.models": "command",
    "services.models.speech_detection": "stage",
    "services.models.checkpoint": "stage",
    "services.models.codec_speech": "stage",
    "services.models.hibari": "stage",
    "services.models.movies": "stage",
    "services.models.qwen3_omni": "stage",
    "services.models.qwen3_tts": "stage",
}


class Raised(NamedTuple):
    """A place that raises an error. `code` is "" if it depends on the caller, and `source` if the package is shared."""

    place: str
    reason: str
    code: str
    metadata: frozenset[str]
    source: str
    has_delay: bool


@dataclass
class Findings:
    """The errors that the code raises, and the places whose reason cannot be determined."""

    raised: list[Raised] = field(default_factory=list)
    named: list[tuple[str, str]] = field(default_factory=list)
    """The places and reasons that code compares with or passes to a function."""
    unclear: list[str] = field(default_factory=list)
    common_metadata: set[str] = field(default_factory=set)
    """The metadata keys that are added to errors of any reason."""


class _Class(NamedTuple):
    code: str
    default: str


class _Module:
    def __init__(self, path: Path) -> None:
        parts = path.relative_to(ROOT).with_suffix("").parts
        self.name = ".".join(parts[parts.index("stagemesh") + 1 :])
        self.file = path.relative_to(ROOT)
        self.tree = ast.parse(path.read_text())
        self.parents = {child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)}
        prefixes = [each for each in _SOURCES if f"{self.name}.".startswith(f"{each}.")]
        self.source = _SOURCES[max(prefixes, key=len)] if prefixes else ""

    def place(self, node: ast.expr | ast.stmt) -> str:
        return f"{self.file}:{node.lineno}"

    def function_of(self, node: ast.AST) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
        while (node := self.parents.get(node)) is not None:  # type: ignore[assignment]
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                return node
        return None


def find_raised() -> Findings:
    """Returns the errors that the packages of the product raise."""
    files = sorted(path for source in SOURCES if source != "protos" for path in (ROOT / source).rglob("*.py"))
    return _Search([_Module(path) for path in files]).run()


class _Search:
    def __init__(self, modules: list[_Module]) -> None:
        self._modules = modules
        self._found = Findings()
        self._constants = _constants(modules)
        self._classes = _error_classes(modules)
        self._helpers: dict[tuple[str, str], tuple[str, frozenset[str]]] = {}
        """The code and the metadata of the errors that a function raises with the reason in one of its parameters."""

    def run(self) -> Findings:
        for module in self._modules:
            for node in ast.walk(module.tree):
                if isinstance(node, ast.Call):
                    self._visit_call(module, node)
                elif isinstance(node, ast.Compare) and _is_reason(node.left):
                    self._name(module, node, node.comparators[0])
                elif isinstance(node, ast.Assign) and _is_reason(node.targets[0]) and module.name != _BASE:
                    self._raise(module, node, node.value, _Class("", ""), frozenset(), has_delay=False)
        for module in self._modules:
            for call in _calls(module):
                self._visit_helper_call(module, call)
        return self._found

    def _visit_call(self, module: _Module, call: ast.Call) -> None:
        given = {keyword.arg: keyword.value for keyword in call.keywords}
        metadata = _literal_keys(given.get("metadata"))
        name = _called(call)
        if name == "located":
            self._found.common_metadata |= {key for key in given if key is not None}
        if _is_reason(given.get("reason")):
            # The error has the reason of another error.
            self._found.common_metadata |= metadata
            return
        kind = self._classes.get(name)
        if kind is None:
            return
        has_delay = "retry_after_s" in given
        if "reason" in given:
            self._raise(module, call, given["reason"], kind, metadata, has_delay=has_delay)
        elif kind.default or module.name == _FOREIGN_STATUSES:
            reason = kind.default or kind.code
            self._found.raised.append(Raised(module.place(call), reason, kind.code, metadata, module.source, has_delay))
        else:
            self._found.unclear.append(f"{module.place(call)}: {name} has no default reason; give it a reason")

    def _raise(
        self,
        module: _Module,
        node: ast.expr | ast.stmt,
        reason: ast.expr,
        kind: _Class,
        metadata: frozenset[str],
        *,
        has_delay: bool,
    ) -> None:
        function = module.function_of(node)
        if isinstance(reason, ast.Name) and function is not None and reason.id in _parameters(function):
            self._helpers[function.name, reason.id] = (kind.code, metadata)
            values = self._values(module, node, _parameters(function)[reason.id])
        else:
            values = self._values(module, node, reason)
            if not values:
                self._found.unclear.append(f"{module.place(node)}: write the reason as a literal or a constant")
        for value in values:
            self._found.raised.append(Raised(module.place(node), value, kind.code, metadata, module.source, has_delay))

    def _visit_helper_call(self, module: _Module, call: ast.Call) -> None:
        """Visits a call that is not of an error class, but that passes a reason."""
        if _called(call) in self._classes:
            return
        for keyword in call.keywords:
            helper = self._helpers.get((_called(call), keyword.arg or ""))
            if helper is not None or keyword.arg == "reason":
                code, metadata = helper or ("", frozenset[str]())
                for value in self._values(module, call, keyword.value):
                    raised = Raised(module.place(call), value, code, metadata, module.source, has_delay=False)
                    self._found.raised.append(raised)

    def _name(self, module: _Module, node: ast.expr, value: ast.expr) -> None:
        self._found.named += [(module.place(node), reason) for reason in self._values(module, node, value)]

    def _values(self, module: _Module, node: ast.AST, value: ast.expr | None) -> set[str]:
        """Returns the reasons that an expression can have, or an empty set if they cannot be determined."""
        match value:
            case ast.Constant(value=str(text)):
                return {text} if UPPER.fullmatch(text) else set()
            case ast.Name(id=name):
                function = module.function_of(node)
                local = [] if function is None else list(_assigned(function, name))
                parts = local or self._constants.get((module.name, name)) or self._constants.get(("", name), [])
            case ast.IfExp(body=first, orelse=second):
                parts = [first, second]
            case ast.Set(elts=parts) | ast.Tuple(elts=parts) | ast.List(elts=parts) | ast.Dict(values=parts):
                pass
            case ast.Call(func=ast.Name(id="frozenset"), args=parts):
                pass
            case ast.Subscript(value=table):
                parts = [table]
            case _:
                parts = []
        return {text for part in parts for text in self._values(module, node, part)}


def _error_classes(modules: list[_Module]) -> dict[str, _Class]:
    known = {
        name: _Class(kind.code.name, kind.default_reason)
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, errors.StagemeshError)
    }
    definitions = [node for module in modules for node in ast.walk(module.tree) if isinstance(node, ast.ClassDef)]
    while added := [each for each in definitions if each.name not in known and _base(each) in known]:
        for definition in added:
            code, default = known[_base(definition)]
            own = [each.value for each in definition.body if isinstance(each, ast.Assign | ast.AnnAssign)]
            texts = [each.value for each in own if isinstance(each, ast.Constant) and isinstance(each.value, str)]
            known[definition.name] = _Class(code, texts[0] if texts else default)
    return known


def _constants(modules: list[_Module]) -> dict[tuple[str, str], list[ast.expr]]:
    """Returns the values of module constants by module and name, and under the module "" those of all modules."""
    constants = defaultdict[tuple[str, str], list[ast.expr]](list)
    for module in modules:
        for node in module.tree.body:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                for key in ((module.name, node.targets[0].id), ("", node.targets[0].id)):
                    constants[key].append(node.value)
    return constants


def _calls(module: _Module) -> Iterator[ast.Call]:
    return (node for node in ast.walk(module.tree) if isinstance(node, ast.Call))


def _called(call: ast.Call) -> str:
    function = call.func
    return function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")


def _base(definition: ast.ClassDef) -> str:
    base = definition.bases[0] if definition.bases else None
    return base.id if isinstance(base, ast.Name) else getattr(base, "attr", "")


def _is_reason(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "reason"


def _literal_keys(node: ast.expr | None) -> frozenset[str]:
    keys = [key for each in ast.walk(node) if isinstance(each, ast.Dict) for key in each.keys] if node else []
    return frozenset(key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str))


def _parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> dict[str, ast.expr | None]:
    """Returns the parameters of a function with their defaults."""
    arguments = function.args
    plain = [*arguments.posonlyargs, *arguments.args]
    defaults = [*[None] * (len(plain) - len(arguments.defaults)), *arguments.defaults, *arguments.kw_defaults]
    return dict(zip((each.arg for each in [*plain, *arguments.kwonlyargs]), defaults, strict=True))


def _assigned(function: ast.AST, name: str) -> Iterator[ast.expr]:
    """Yields the values that a function assigns to a variable, alone or as part of a tuple."""
    for node in ast.walk(function):
        if not isinstance(node, ast.Assign):
            continue
        target, value = node.targets[0], node.value
        if isinstance(target, ast.Name) and target.id == name:
            yield value
        elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            for each, part in zip(target.elts, value.elts, strict=True):
                if isinstance(each, ast.Name) and each.id == name:
                    yield part
