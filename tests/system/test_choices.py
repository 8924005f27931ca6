"""Requests with several choices, with real processes that are killed."""

from collections.abc import Callable, Iterator, Mapping

import pytest

from stagemesh.client import Choice, Client, Result, Text
from stagemesh.client.responses import ResultBuilder
from tests.deployment import Deployment, deployed, eventually
from tests.system.breakable_relay import breakable_relay
from tests.system.pipelines import relays

STEPS, CHOICES, SEED = 30, 3, 2**63 - 2


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with deployed(relays(tmp_path_factory.mktemp("relays"), steps=STEPS, step_s=0.03)) as up:
        yield up


@pytest.fixture(scope="module")
def apart(up: Deployment) -> list[tuple[str, bytes]]:
    """Returns what the choices contain as requests of their own."""
    with up.client() as client:
        seeds = [(SEED + index) % 2**63 for index in range(CHOICES)]
        return [_contents(client.generate("hello", seed=seed).result()) for seed in seeds]


def test_choices_equal_requests_with_their_seeds(up: Deployment, apart: list[tuple[str, bytes]]) -> None:
    with up.client() as client:
        result = client.generate("hello", seed=SEED, choices=CHOICES).result()
    assert [_contents(choice) for choice in result.choices] == apart
    assert len({text for text, _ in apart}) == CHOICES
    assert [choice.seed for choice in result.choices] == [2**63 - 2, 2**63 - 1, 0]
    assert result.finished.usage["source"].steps == CHOICES * STEPS


@pytest.mark.parametrize("replica", ["source-0", "relay-0", "frames-0"])
def test_choices_survive_the_death_of_a_stage(up: Deployment, apart: list[tuple[str, bytes]], replica: str) -> None:
    with up.client() as client:
        result = _run(client, {20: lambda: up.kill(replica)})
    assert [_contents(choice) for choice in result.choices] == apart
    eventually(up.idle, timeout_s=10)


def test_choices_survive_the_death_of_the_orchestrator(up: Deployment, apart: list[tuple[str, bytes]]) -> None:
    with up.client() as client:
        result = _run(client, {35: lambda: up.kill("orchestrator")})
    assert [_contents(choice) for choice in result.choices] == apart
    eventually(up.idle, timeout_s=10)


def test_choices_continue_after_a_broken_connection(up: Deployment, apart: list[tuple[str, bytes]]) -> None:
    with breakable_relay(up.endpoint) as way, Client(way.endpoint) as client:
        result = _run(client, {5: way.cut, 40: way.cut, 41: way.cut})
    assert [_contents(choice) for choice in result.choices] == apart
    eventually(up.idle, timeout_s=10)


def _run(client: Client, at: Mapping[int, Callable[[], None]]) -> Result:
    """Runs a request, and calls a function each time that a certain number of texts has arrived."""
    builder, texts, left = ResultBuilder(), 0, dict(at)
    for event in client.generate("hello", seed=SEED, choices=CHOICES):
        builder.add(event)
        if isinstance(event, Text):
            texts += 1
            if (act := left.pop(texts, None)) is not None:
                act()
    assert not left, "something was not done"
    return builder.build()


def _contents(choice: Choice) -> tuple[str, bytes]:
    return choice.text, b"".join(output.tensor.tobytes() for output in choice.tensors["frames"])
