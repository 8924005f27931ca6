"""Checks the locations of media files in a pipeline file."""

from collections.abc import Iterator

from stagemesh.common.media_config import LOCAL, parse_root
from stagemesh.orchestrator.spec.schema import MediaEntry
from stagemesh.orchestrator.spec.source.problem_lines import KeyPath, Problems, suggest


def check_media(media: MediaEntry, problems: Problems, *, check_packages: bool) -> None:
    """Reports an error for each option of a protocol that no location has.

    If `check_packages` is True, also reports a location whose protocol is unknown, or whose Python package is not
    installed.
    """
    roots = dict(_roots(media))
    if not roots:
        problems.add(("media",), "media names no location; add `store: FOLDER OR URL`, or `allowed` locations")
    protocols = {parse_root(root).protocol for root in roots.values()}
    for name in media.storage_options:
        if name not in protocols:
            text = f"no location of media has the protocol {name!r}; {suggest(name, protocols)}"
            problems.add(("media", "storage_options", name), text)
    for path, root in roots.items() if check_packages else ():
        if text := _missing_package(parse_root(root).protocol):
            problems.add(path, text)


def _roots(media: MediaEntry) -> Iterator[tuple[KeyPath, str]]:
    if media.store:
        yield ("media", "store"), media.store
    for number, root in enumerate(media.allowed):
        yield ("media", "allowed", number), root


def _missing_package(protocol: str) -> str:
    if protocol == LOCAL:
        return ""
    from fsspec import get_filesystem_class

    try:
        get_filesystem_class(protocol)
    except ImportError as exc:
        return f"{protocol}:// needs a Python package: {exc}; install it for every stage and for the media service"
    except ValueError:
        return f"fsspec does not know {protocol}://; use a folder, or a protocol such as s3://"
    return ""
