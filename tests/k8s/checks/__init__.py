"""Finds faults in rendered objects that neither helm nor kubernetes-validate reports."""

from collections.abc import Callable, Iterator

from tests.k8s.checks.access import check_access
from tests.k8s.checks.containers import check_containers
from tests.k8s.checks.metadata import check_metadata
from tests.k8s.checks.references import check_references
from tests.k8s.checks.resources import check_resources
from tests.k8s.checks.scalars import check_scalars
from tests.k8s.checks.security import check_security
from tests.k8s.manifests import Render

CHECKS: tuple[Callable[[Render], Iterator[str]], ...] = (
    check_metadata,
    check_scalars,
    check_containers,
    check_resources,
    check_references,
    check_access,
    check_security,
)


def find_problems(render: Render) -> list[str]:
    """Returns each fault as a sentence that names the object and the field."""
    return [problem for check in CHECKS for problem in check(render)]
