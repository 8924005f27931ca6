"""Wrong values are refused when the chart is rendered, with the path of the value and the remedy."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.k8s.helm import CHART, HELMS, HelmError, read_values, render_text, run_helm
from tests.k8s.release import SHARED, SPEECH, at, merged

FOLDER = Path(__file__).parent
RULES = read_values(FOLDER / "refused_by_rules.yaml")
TYPES = read_values(FOLDER / "refused_by_schema.yaml")


def cases(names: list[str]) -> list[tuple[str, str]]:
    """Returns pairs of a name and a helm. The rules are of the chart: a sample by helm 3 shows that it applies them."""
    return [*((name, "helm4") for name in names), *((name, "helm3") for name in names[::10])]


def refusal(helm: str, case: dict[str, Any]) -> str:
    """Returns the message with which helm refuses the values of a case."""
    base = SHARED[case["with"]] if "with" in case else {}
    values = merged(SPEECH, base, *(at(path, value) for path, value in case.get("values", {}).items()))
    with pytest.raises(HelmError) as refused:
        render_text(values, helm=helm)
    return str(refused.value)


@pytest.mark.parametrize(("name", "helm"), cases([*RULES]))
def test_wrong_values_are_refused_with_the_remedy(name: str, helm: str) -> None:
    message = refusal(helm, RULES[name])
    assert [part for part in RULES[name]["message"] if part not in message] == [], message


@pytest.mark.parametrize(("name", "helm"), cases([*TYPES]))
def test_values_that_the_schema_forbids_are_refused_with_their_path(name: str, helm: str) -> None:
    message = refusal(helm, TYPES[name])
    assert "values don't meet the specifications of the schema" in message
    assert [part for part in TYPES[name]["names"] if part not in message] == [], message


@pytest.mark.parametrize("helm", HELMS)
@pytest.mark.parametrize("name", ["1s", "my.speech"])
def test_a_release_whose_name_cannot_begin_the_name_of_a_service_is_refused(name: str, helm: str) -> None:
    def render_as(values: dict[str, Any]) -> str:
        return run_helm(helm, "template", name, str(CHART), "--values", "-", stdin=json.dumps(values))

    with pytest.raises(HelmError, match=f"{name}.*set fullnameOverride to a name of lower-case letters"):
        render_as(SPEECH)
    assert "speech-orchestrator" in render_as(merged(SPEECH, at("fullnameOverride", "speech")))
