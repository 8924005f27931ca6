"""Checks names, labels and annotations."""

import re
from collections import Counter
from collections.abc import Iterator

from tests.k8s.manifests import Manifest, Render, field, reference, walk

DNS_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
# The name of a Service, whose first character is a letter.
SERVICE_NAME = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
_DNS_SUBDOMAIN = re.compile(r"(?=.{1,253}$)[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_KEY_NAME = re.compile(r"[A-Za-z0-9]([-_.A-Za-z0-9]{0,61}[A-Za-z0-9])?")
_LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-_.A-Za-z0-9]{0,61}[A-Za-z0-9])?)?")
_MAX_ANNOTATIONS_BYTES = 256 * 1024


def check_metadata(render: Render) -> Iterator[str]:
    """Yields names, labels and annotations that an API server refuses, and objects that exist twice."""
    for item in render.objects:
        yield from _check_name(item)
        for path, value in walk(item):
            if path.endswith(("labels", "matchLabels", "nodeSelector")) and isinstance(value, dict):
                yield from _check_labels(f"{reference(item)}: {path}", value)
            if path.endswith("annotations") and isinstance(value, dict):
                yield from _check_annotations(f"{reference(item)}: {path}", value)
    identities = Counter(
        (item["apiVersion"].partition("/")[0], reference(item), field(item, "metadata.namespace"))
        for item in render.objects
    )
    yield from (f"{name}: exists {count} times" for (_, name, _), count in identities.items() if count > 1)


def _check_name(item: Manifest) -> Iterator[str]:
    pattern = SERVICE_NAME if item["kind"] == "Service" else DNS_LABEL
    if not pattern.fullmatch(item["metadata"]["name"]):
        yield f"{reference(item)}: metadata.name is not a DNS label of at most 63 characters"


def _check_labels(where: str, labels: Manifest) -> Iterator[str]:
    for key, value in labels.items():
        yield from _check_key(where, key)
        if not isinstance(value, str) or not _LABEL_VALUE.fullmatch(value):
            yield f"{where}: the value {value!r} of {key} is not the value of a label"


def _check_annotations(where: str, annotations: Manifest) -> Iterator[str]:
    for key, value in annotations.items():
        yield from _check_key(where, key)
        if not isinstance(value, str):
            yield f"{where}: the value of {key} is not a string"
    if sum(len(str(value)) + len(key) for key, value in annotations.items()) > _MAX_ANNOTATIONS_BYTES:
        yield f"{where}: more than {_MAX_ANNOTATIONS_BYTES} bytes"


def _check_key(where: str, key: str) -> Iterator[str]:
    prefix, separator, name = key.rpartition("/")
    if not _KEY_NAME.fullmatch(name) or (separator and not _DNS_SUBDOMAIN.fullmatch(prefix)):
        yield f"{where}: {key!r} is not a valid key"
