"""The names in a certificate: replicas of one stage, and nothing that only looks like them."""

import contextvars
from collections.abc import Callable

import pytest

from stagemesh.common.errors import PermissionDeniedError, UnauthenticatedError
from stagemesh.rpc.callers import check_reader, check_replica, identity_of_certificate, set_identity
from tests.rpc.call_errors import raises


def _uris(*names: str) -> dict[str, list[bytes]]:
    return {"peer_uri": [f"stagemesh://{name}".encode() for name in names]}


def _called_by(check: Callable[[], None], *names: str) -> None:
    """Calls `check` in an RPC whose caller has a certificate with these names."""
    identity = identity_of_certificate(_uris(*names))
    assert identity is not None

    def run() -> None:
        set_identity(identity)
        check()

    contextvars.copy_context().run(run)


@pytest.mark.parametrize(
    ("pattern", "name"),
    [
        ("omni-0", "omni-0"),
        ("omni-*", "omni-12"),
        ("omni-*-*", "omni-7d9f8c5b6-x2v4k"),
        ("*-thinker", "node_1.example-thinker"),
    ],
)
def test_a_pattern_names_the_replicas_of_its_form(pattern: str, name: str) -> None:
    _called_by(lambda: check_replica(name, stage="thinker"), f"stage/thinker/{pattern}")


@pytest.mark.parametrize(
    ("pattern", "name"),
    [
        ("omni-*", "omni-private-0"),
        ("omni-*-*", "omni-private-7d9f8c5b6-x2v4k"),
        ("omni-*", "omni-0\n"),
        ("omni-*", "omni-0\nERROR forged"),
        ("omni-0", "omni-0\n"),
        ("omni-*", "omni-a/b"),
        ("omni-*", "omni-\u0660"),
        ("omni.*", "omniX0"),
        ("omni-[01]", "omni-0"),
        ("omni-?", "omni-0"),
        ("*-*", "@input-0"),
    ],
)
def test_a_pattern_names_no_other_replica(pattern: str, name: str) -> None:
    with raises(PermissionDeniedError, reason="REPLICA_MISMATCH"):
        _called_by(lambda: check_replica(name), f"stage/thinker/{pattern}")


def test_a_replica_of_another_stage_is_not_named() -> None:
    with raises(PermissionDeniedError, reason="REPLICA_MISMATCH", match="of stage 'talker'; it names thinker/a-0"):
        _called_by(lambda: check_replica("a-0", stage="talker"), "stage/thinker/a-0")


def test_an_orchestrator_sends_input_and_is_no_replica() -> None:
    _called_by(lambda: check_replica("@input-1f"), "orchestrator/main")
    with raises(PermissionDeniedError, reason="REPLICA_MISMATCH"):
        _called_by(lambda: check_replica("thinker-0"), "orchestrator/main")


def test_a_client_reads_no_flow() -> None:
    with raises(PermissionDeniedError, reason="REPLICA_MISMATCH"):
        _called_by(lambda: check_reader(stage="thinker"), "client/alice")


@pytest.mark.parametrize(
    "name", ["stage/thinker-0", "stage/thinker-*", "stage/thinker/", "stage//thinker-0", "stage/*"]
)
def test_a_name_of_the_former_scheme_is_refused_with_the_remedy(name: str) -> None:
    remedy = r"stagemesh certificate new FOLDER --authority AUTHORITY --name stage/STAGE/"
    with raises(UnauthenticatedError, reason="UNKNOWN_IDENTITY", match=remedy):
        identity_of_certificate(_uris("client/alice", name))


@pytest.mark.parametrize("name", ["stage/thinker/**", "stage/thinker/omni-*.*-0", "stage/thinker/" + "*a" * 20])
def test_a_name_that_takes_long_to_compare_is_refused(name: str) -> None:
    with raises(UnauthenticatedError, reason="UNKNOWN_IDENTITY", match="two \\* without a - between them"):
        identity_of_certificate(_uris("client/alice", name))


@pytest.mark.parametrize(
    "name", ["client/alice\nERROR forged", "client/alice\x1b[2J", "stage/thinker/a-0\n", "clients/a"]
)
def test_a_name_with_control_characters_or_an_unknown_role_is_none(name: str) -> None:
    assert identity_of_certificate(_uris(name)) is None
