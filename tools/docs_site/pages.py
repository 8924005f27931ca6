"""The pages of the site: which file of the repository each page shows, and how their links lead to each other."""

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

ROOT = Path(__file__).resolve().parents[2]
HOME = "README.md"
_DOCS = "docs/"
_COPIES = "repository/"
_LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)\s]+)")
_LANGUAGES = {".yaml": "yaml", ".proto": "protobuf", ".py": "python", ".ts": "typescript", ".json": "json"}
_REFERENCES = {"benchmarks/results": "performance.md"}
"""The generated pages that show a folder of the repository."""
_GENERATED = re.compile(r"_pb2(_grpc)?\.pyi?$|^py\.typed$|^node_modules$|^dist$|^gen$|^__pycache__$")


def page_of(path: str) -> str:
    """Returns the page, relative to the site's sources, that shows a file or folder of the repository."""
    if path == HOME:
        return "index.md"
    if path.startswith(_DOCS):
        return path.removeprefix(_DOCS)
    if path in _REFERENCES:
        return _REFERENCES[path]
    if (ROOT / path).is_dir():
        return f"{_COPIES}{path}/index.md"
    return f"{_COPIES}{path}" if path.endswith(".md") else f"{_COPIES}{path}.md"


def find_linked(path: str, markdown: str) -> Iterator[str]:
    """Yields the files and folders of the repository to which the document at `path` links."""
    for match in _LINK.finditer(markdown):
        target = _resolve(path, match[1])
        if (ROOT / target).exists():
            yield target


def relocate_links(path: str, markdown: str) -> str:
    """Returns the document at `path` with links that lead from its page to other pages.

    A link to a file that does not exist remains, so that the build rejects it.
    """
    page, base = page_of(path), _base_of(path)

    def relocate(match: re.Match[str]) -> str:
        target, fragment = _resolve(base, match[1]), urlsplit(match[1]).fragment
        if not (ROOT / target).exists():
            return match[1]
        link = posixpath.relpath(page_of(target), posixpath.dirname(page))
        return f"{link}#{fragment}" if fragment else link

    return _LINK.sub(relocate, markdown)


def show(path: str) -> str:
    """Returns a file or folder of the repository as Markdown, with links as they are in the repository.

    A folder is a list of its files. A file in another format is a code block.
    """
    source = ROOT / path
    if source.is_dir():
        entries = sorted(each.name for each in source.iterdir() if _is_shown(each))
        items = [f"- [{name}]({name})" for name in entries]
        return "\n".join([f"# {path}", "", *items, ""])
    text = source.read_text()
    if source.suffix == ".md":
        return text
    return f"# {path}\n\n````{_LANGUAGES.get(source.suffix, 'text')}\n{text.rstrip()}\n````\n"


def find_copies(documents: dict[str, str]) -> dict[str, str]:
    """Returns the files and folders outside docs/ to which some documents link, directly or not.

    The keys are paths in the repository. The values are Markdown with links as they are in the repository.
    """
    found: dict[str, str] = {}
    open_items = [target for path, markdown in documents.items() for target in find_linked(path, markdown)]
    while open_items:
        path = open_items.pop()
        if path not in {*found, *documents, *_REFERENCES} and not path.startswith(_DOCS):
            found[path] = show(path)
            # A file's own code may look like a link.
            if path.endswith(".md") or (ROOT / path).is_dir():
                open_items += find_linked(_base_of(path), found[path])
    return found


def _resolve(path: str, link: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(path), urlsplit(link).path))


def _base_of(path: str) -> str:
    """Returns the path from which the links of a page are resolved: for a folder, that of a file in it."""
    return f"{path}/index.md" if (ROOT / path).is_dir() else path


def _is_shown(path: Path) -> bool:
    return not _GENERATED.search(path.name) and (path.is_dir() or path.suffix in {".md", *_LANGUAGES})
