"""Checks docstrings, comments, help texts, messages and documents for phrases that obscure their meaning.

Run it in the repository's root: python tools/prose_lint.py [--base REVISION] [PATH ...]

Most rules apply to all text. Those of `RATCHET` apply only to the lines that have changed since REVISION, which is
where this branch left origin/main, or else the commit before the last.
"""

import argparse
import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

ROOTS = (
    "clients",
    "common",
    "pipeline",
    "connectors",
    "services",
    "orchestrator",
    "cli",
    "gateway",
    "jobs",
    "tests",
    "benchmarks",
    "k8s",
    "examples",
    "tools",
    "docs",
    "protos",
)
DOCUMENTS = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")
_SKIPPED = re.compile(
    r"/node_modules/|_pb2(_grpc)?\.pyi?$|^tools/prose_lint\.py$|^tests/repository/test_prose_lint\.py$"
)
_LOG_METHODS = {"debug", "info", "warning", "error", "exception", "critical"}
_VERB = r"(is|are|was|were|has|have|had|can|may|must|will|would|does|do|needs?|takes?)"


class Rule(NamedTuple):
    """A phrase to avoid, and what to write instead. `opening` rules apply to the first words of a docstring."""

    pattern: re.Pattern[str]
    remedy: str
    opening: bool = False


class Text(NamedTuple):
    """A piece of prose and the line on which it starts."""

    line: int
    content: str
    is_docstring: bool = False


class Finding(NamedTuple):
    """A phrase that a rule rejects."""

    line: int
    phrase: str
    remedy: str


def _rule(pattern: str, remedy: str, *, opening: bool = False) -> Rule:
    return Rule(re.compile(pattern, re.IGNORECASE if not opening else 0), remedy, opening)


RULES = (
    _rule(r"\banew\b", 'write "again", or "restarts"'),
    _rule(r"\bbesides?\b", 'write "in addition to", "together with" or "next to"'),
    _rule(r"\bso (many|long|much|often)\b", "name the number or the limit"),
    _rule(
        r"(?<!there )\b(is|are|was|were) no (?!(longer|larger|more|less|fewer|later|earlier)\b)\w+",
        'write "is not a", or "there is no"',
    ),
    _rule(
        rf", for ((it|they|there|this|that|nothing|both|some) |(an?|the) ((?!that|which|who)\w+ ){{1,3}}){_VERB}\b",
        'write "because"',
    ),
    _rule(r"\b(nobody|whoever|so-manieth)\b", "name the process, the caller or the component"),
    _rule(r"\b(lets?|letting) go\b", 'write "release"'),
    _rule(r"\b(is|are|was|were|be|been) told\b", 'write "is notified", "receives" or "is reported"'),
    _rule(r"\b(goes|go|going|went) on\b(?! (a|the)\b)", 'write "continues", or "resumes after"'),
    _rule(r"\bneighbou?rs?\b", 'write "upstream stage", "downstream stage" or "peer"'),
    _rule(r"\b(pictures?|films?)\b", 'write "image" or "video"'),
    _rule(r"\b(mourners?|rosters?|Dice|seats?)\b", "use the standard term of the glossary"),
    _rule(
        r"^(What|Who|Whoever|Those|Of|By(?! default)|Whom|Whose)\b", "start with a verb or with a noun", opening=True
    ),
    _rule(r"^See (the )?[`A-Z\w.]+[^ ]*\.?$", "delete a docstring that only points elsewhere", opening=True),
)
RATCHET = (
    _rule(r"\b(the|a|its|their|at|from|of|before|after) begin\b", 'write "start"'),
    _rule(r", so that\b", "state the result in its own sentence, or drop the comma if it is a purpose"),
    _rule(r"\b(that|those) of\b", "repeat the noun"),
    _rule(r"\b(something|a \w+|an \w+|\w+s) of (its|their|one's|our|your) own\b", 'write "its own"'),
    _rule(r"\bby (TLS|mTLS|gRPC|HTTPS?|TCP|UDP|RDMA|NVLink|WebSockets?)\b", 'write "over"'),
    _rule(r"\bof the user\b(?!')", "write a possessive: the user's"),
    _rule(r"(?:^|[.;:!]\s+)Who\b(?![^.]*\?)", "name the person or the process"),
    _rule(r"\bshall\b", 'write "must", "will" or the present tense'),
    _rule(r"(?<!\")\bmediums?\b", 'write "media item"'),
    _rule(r"\bfigures?\b", 'write "metric", "measurement" or "number"'),
    _rule(
        r"\b(an|the) admin\b(?!['-]| (API|service|port|endpoint|address|RPC|command|role|channel))|\badmins\b",
        'write "operator"',
    ),
    _rule(r"\bexit codes?\b", 'write "exit status"'),
)
"""Rules that older text does not follow yet."""
_DEFAULT_IN_WORDS = _rule(r"\bUses .+ if omitted\b", "typer shows the default")
_PRIVATE_NAMES = {"seat", "seats", "roster", "dice", "mourner", "mourners", "whoever", "nobody", "lender", "rememberer"}


def check(texts: Iterable[Text], rules: Sequence[Rule] = RULES) -> Iterator[Finding]:
    """Yields the findings in some texts."""
    for text in texts:
        for rule in rules:
            if rule.opening and not text.is_docstring:
                continue
            for match in rule.pattern.finditer(text.content.strip() if rule.opening else text.content):
                line = text.line + text.content.count("\n", 0, match.start())
                yield Finding(line, " ".join(match.group().split()), rule.remedy)


def python_texts(source: str) -> Iterator[Text]:
    """Yields the docstrings, comments, help texts, and messages of errors and logs in a Python module."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield Text(token.start[0], token.string)
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(value=ast.Constant(value=str(content))):
                yield Text(node.lineno, content, is_docstring=True)
            case ast.Raise(exc=ast.Call(args=args)):
                yield from _strings(args)
            case ast.Call(func=ast.Attribute(attr=name), args=[first, *_]) if name in _LOG_METHODS:
                yield from _strings([first])
            case ast.keyword(arg="help", value=value):
                yield from _strings([value])
            case _:
                pass


def helps_with_a_default(source: str) -> Iterator[Text]:
    """Yields the help texts of the parameters of commands whose default typer shows."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            parameters = [*node.args.posonlyargs, *node.args.args]
            pairs = [*zip(reversed(parameters), reversed(node.args.defaults), strict=False)]
            for parameter, default in [*pairs, *zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)]:
                has_default = default is not None and ast.unparse(default) not in {"None", "''", "()"}
                for part in ast.walk(parameter) if has_default else ():
                    if isinstance(part, ast.keyword) and part.arg == "help":
                        yield from _strings([part.value])


def private_names(source: str) -> Iterator[Finding]:
    """Yields the definitions of classes, functions and parameters whose names contain a private word."""
    for node in ast.walk(ast.parse(source)):
        name = node.arg if isinstance(node, ast.arg) else getattr(node, "name", None)
        words = re.findall(r"[A-Z]?[a-z]+", name) if isinstance(name, str) else []
        for word in {word.lower() for word in words} & _PRIVATE_NAMES:
            yield Finding(getattr(node, "lineno", 1), f"{name} ({word})", "use the standard term of the glossary")


def document_texts(source: str, *, is_proto: bool) -> Iterator[Text]:
    """Yields the lines of a Markdown document outside of code blocks, or the comments of a .proto file."""
    is_code = False
    for number, line in enumerate(source.splitlines(), 1):
        is_code ^= line.lstrip().startswith("```")
        if (line.lstrip().startswith("//")) if is_proto else not (is_code or line.startswith("    ")):
            yield Text(number, line)


def check_file(path: Path, changed: Collection[int] = ()) -> list[Finding]:
    """Returns the findings in a Python, Markdown or .proto file in the order of their lines.

    The rules of `RATCHET` apply to the lines with the numbers in `changed`.
    """
    source, names, helps = path.read_text(), list[Finding](), list[Text]()
    if path.suffix == ".py":
        texts = list(python_texts(source))
        names, helps = list(private_names(source)), list(helps_with_a_default(source))
    else:
        texts = list(document_texts(source, is_proto=path.suffix == ".proto"))
    newer = [*check(texts, RATCHET), *check(helps, [_DEFAULT_IN_WORDS])]
    return sorted({*check(texts), *names, *(each for each in newer if each.line in changed)})


def changed_lines(base: str) -> Mapping[str, Collection[int]]:
    """Returns the numbers of the lines of each file that have been added or changed since a revision."""
    changed, numbers = dict[str, set[int]](), set[int]()
    for line in _git("diff", "--unified=0", "--no-color", "--no-ext-diff", "-M", base).splitlines():
        if line.startswith("+++ "):
            numbers = changed.setdefault(line.removeprefix("+++ b/").rstrip("\t"), set())
        elif found := re.match(r"@@ -\S+ \+(\d+)(?:,(\d+))? @@", line):
            start, count = int(found[1]), int(found[2] or 1)
            numbers.update(range(start, start + count))
    for name in _git("ls-files", "--others", "--exclude-standard").splitlines():
        changed[name] = set(range(1, Path(name).read_bytes().count(b"\n") + 2))
    return changed


def default_base() -> str:
    """Returns where HEAD left origin/main, or else the commit before the last. Empty if git knows neither."""
    return (_git("merge-base", "HEAD", "origin/main") or _git("rev-parse", "--quiet", "--verify", "HEAD~1")).strip()


def main(arguments: list[str]) -> int:
    """Prints the findings in the given files and folders, or in the whole repository. Returns 1 if there are any."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", default=default_base(), help="the revision since which lines have changed")
    parser.add_argument("paths", nargs="*", type=Path, metavar="PATH")
    options = parser.parse_args(arguments)
    changed: Mapping[str, Collection[int]] = changed_lines(options.base) if options.base else {}
    paths = options.paths or [Path(name) for name in (*ROOTS, *DOCUMENTS)]
    files = [file for path in paths for file in (sorted(path.rglob("*")) if path.is_dir() else [path])]
    count = 0
    for file in files:
        if file.suffix in {".py", ".md", ".proto"} and not _SKIPPED.search(str(file)):
            for finding in check_file(file, changed.get(str(file), ())):
                print(f"{file}:{finding.line}: {finding.phrase!r}: {finding.remedy}")
                count += 1
    print(f"{count} findings" if count else "the prose is clean", file=sys.stderr)
    return 1 if count else 0


def _git(*arguments: str) -> str:
    """Returns what git prints, or an empty text if it fails or is not installed."""
    command = ["git", "-c", "core.quotePath=false", *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout
    except FileNotFoundError:
        return ""


def _strings(nodes: Iterable[ast.AST]) -> Iterator[Text]:
    for node in nodes:
        for part in ast.walk(node):
            if isinstance(part, ast.Constant) and isinstance(part.value, str):
                yield Text(part.lineno, part.value)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
