"""docs/clients-matrix.md shows the results of the locked versions and of the scripts as they are."""

import json

import pytest
from requirements.lock import normalize, read

from tests.clients.environments import CLIENTS
from tools.docs_site.clients import PAGE, read_results, render_clients

RESULTS = read_results()


def test_the_page_shows_the_results() -> None:
    # If this fails, run python -m tools.docs_site.clients.
    assert PAGE.read_text() == render_clients(RESULTS)
    assert RESULTS.keys() == CLIENTS.keys()


@pytest.mark.parametrize("name", CLIENTS)
def test_a_result_is_that_of_the_lock_file_and_the_script(name: str) -> None:
    # If this fails, run make clients CLIENTS=NAME.
    client, result = CLIENTS[name], RESULTS[name]
    if client.is_node:
        packages = json.loads(client.lock.read_text())["packages"]
        locked = {each: packages[f"node_modules/{each}"]["version"] for each in client.names}
    elif client.recorded:
        locked = dict(client.recorded)
    else:
        pins = read("cpu.txt" if client.installed else f"clients/{name}.txt")
        locked = {each: pins[normalize(each)].version for each in client.names}
    assert (result.versions, result.digest) == (locked, client.digest)
    assert {feature for feature, problem in result.problems.items() if problem} == client.gaps.keys()
