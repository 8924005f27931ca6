"""Seeds faults into sound manifests, and expects that each is found and named."""

import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.k8s.checks import find_problems
from tests.k8s.checks.scalars import parse_quantity
from tests.k8s.checks.schemas import VERSIONS, check_schemas
from tests.k8s.helm import load_objects, read_values
from tests.k8s.manifests import Manifest, Render, select

FOLDER = Path(__file__).parent
SOUND = (FOLDER / "sound.yaml").read_text()
EXISTING = frozenset({"hub", "weights"})

BUDGET = "PodDisruptionBudget/tts-vocoder"
POD = "spec template spec"
PREFIXES = {"pod": POD, "container": f"{POD} containers 0"}
FAULTS = read_values(FOLDER / "faults.yaml")
TOO_LONG = {
    "object": "Deployment/tts-vocoder",
    "path": "spec template metadata annotations",
    "value": {"stagemesh.dev/pipeline": "a" * 300_000},
    "problem": "more than 262144 bytes",
}


def sound() -> list[Manifest]:
    # As JSON and back, because an alias of YAML is one object in several places.
    objects: list[Manifest] = json.loads(json.dumps(yaml.safe_load(SOUND)))
    return objects


def with_fault(fault: dict[str, Any]) -> Render:
    """Returns the sound objects with one fault. A fault without a path replaces the whole object."""
    objects = sound()
    changed = select(objects, fault["object"])
    if "path" not in fault:
        changed.clear()
        changed.update(fault["value"])
        return Render(objects, EXISTING)
    first, *rest = fault["path"].split()
    *parents, last = [int(part) if part.isdigit() else part for part in [*PREFIXES.get(first, first).split(), *rest]]
    target: Any = changed
    for part in parents:
        target = target[part]
    if "value" in fault:
        target[last] = fault["value"]
    else:
        del target[last]
    return Render(objects, EXISTING)


def test_sound_manifests_have_no_problems() -> None:
    assert find_problems(Render(sound(), EXISTING)) == []


@pytest.mark.parametrize("version", VERSIONS)
def test_sound_manifests_satisfy_the_schemas(version: str) -> None:
    assert list(check_schemas(Render(sound()), version)) == []


@pytest.mark.parametrize("fault", [*FAULTS["problems"], TOO_LONG], ids=lambda fault: fault["problem"])
def test_a_seeded_fault_is_found(fault: dict[str, Any]) -> None:
    problems = find_problems(with_fault(fault))
    assert any(fault["problem"] in found for found in problems), problems


@pytest.mark.parametrize("fault", FAULTS["schemas"], ids=lambda fault: fault["problem"])
def test_the_schemas_find_a_seeded_fault(fault: dict[str, Any]) -> None:
    problems = list(check_schemas(with_fault(fault), "1.33"))
    assert any(fault["problem"] in found for found in problems), problems


def test_an_object_that_exists_twice_is_found() -> None:
    objects = sound()
    assert f"{BUDGET}: exists 2 times" in find_problems(Render([*objects, select(objects, BUDGET)], EXISTING))


def test_an_object_of_an_unknown_kind_is_found() -> None:
    unknown = {"apiVersion": "example.org/v1", "kind": "Gadget", "metadata": {"name": "a"}}
    assert "Gadget/a: Couldn't find schema" in next(check_schemas(Render([unknown]), "1.33"))


def test_a_key_that_occurs_twice_is_refused() -> None:
    with pytest.raises(yaml.YAMLError, match="duplicate key 'name'"):
        load_objects("metadata: {name: a, name: b}")


@pytest.mark.parametrize(
    ("text", "amount"),
    [("500m", "0.5"), ("2Gi", "2147483648"), ("1.5k", "1500"), ("1e3", "1000"), ("4", "4"), ("2GB", None), ("K", None)],
)
def test_quantities_are_read_as_kubernetes_reads_them(text: str, amount: str | None) -> None:
    assert parse_quantity(text) == (amount if amount is None else Decimal(amount))
