"""The reports of each source of members, in virtual time."""

import asyncio
import time
from collections.abc import AsyncGenerator, Collection
from contextlib import asynccontextmanager, suppress
from typing import Any, cast

import grpc
import pytest

from stagemesh.common.errors import ExistsError, InvalidRequestError, NotReadyError, StaleAttemptError
from stagemesh.common.wire.versions import own_protocol
from stagemesh.orchestrator.config import DnsName, ReplicaAddress
from stagemesh.orchestrator.fleet.membership import (
    DnsSource,
    Member,
    MembershipServicer,
    MemberSource,
    RegistrationSource,
    StaticSource,
)
from stagemesh.pipeline import Pipeline
from stagemesh.v1 import membership_pb2
from stagemesh.v1.protocol_pb2 import Protocol
from tests.orchestrator.virtual_time import in_virtual_time
from tests.rpc.call_errors import raises


class _Listener:
    """The members that joined, and the reasons of those that left."""

    def __init__(self) -> None:
        self.members: list[Member] = []
        self.left: list[str] = []

    def join(self, member: Member) -> None:
        self.members.append(member)

    def leave(self, member: Member, why: str) -> None:
        self.members.remove(member)
        self.left.append(why)

    @property
    def endpoints(self) -> list[str]:
        return [member.endpoint for member in self.members]


class _Caller:
    """The context of a call: collects answers until the connection is `gone`."""

    gone = False

    async def write(self, _: membership_pb2.RegisterResponse) -> None:
        if self.gone:
            raise grpc.aio.InternalError("Failed to send a message")


@asynccontextmanager
async def _followed(source: MemberSource) -> AsyncGenerator[_Listener]:
    listener = _Listener()
    following = asyncio.create_task(source.follow(listener))
    await asyncio.sleep(0)
    try:
        yield listener
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


@asynccontextmanager
async def _registering(
    pipeline: Pipeline, *, generations: Collection[str] = ()
) -> AsyncGenerator[tuple[RegistrationSource, _Listener]]:
    source = RegistrationSource(pipeline, lease_s=15, generations=generations)
    async with _followed(source) as listener:
        yield source, listener


def _identity(chain: Pipeline, /, **fields: object) -> membership_pb2.ReplicaIdentity:
    fitting = {"protocol": own_protocol(), "pipeline": chain.name, "generation": chain.generation}
    listed = {"stage": "b", "replica": "b-0", "incarnation": "one", "endpoint": "h:1"}
    return membership_pb2.ReplicaIdentity(**{**fitting, **listed, **fields})  # type: ignore[arg-type]


async def test_listed_members_are_reported() -> None:
    source = StaticSource({"a": [ReplicaAddress("a-0", "h:1", "a.example")], "b": [ReplicaAddress("b-0", "h:2")]})
    async with _followed(source) as listener:
        assert listener.members == [Member("a", "h:1", "a-0", "a.example"), Member("b", "h:2", "b-0")]


@in_virtual_time
async def test_members_follow_the_addresses_of_a_name() -> None:
    answers: list[Collection[str]] = [["10.0.0.1", "10.0.0.2"], ["10.0.0.2", "fd00::3", "fd00::3"]]
    asked: list[str] = []

    async def resolve(host: str) -> Collection[str]:
        asked.append(host)
        return answers.pop(0) if len(answers) > 1 else answers[0]

    async with _followed(DnsSource("b", DnsName("talkers", 7, poll_s=5), resolve=resolve)) as listener:
        assert listener.endpoints == ["10.0.0.1:7", "10.0.0.2:7"]
        assert {member.server_name for member in listener.members} == {"talkers"}
        await asyncio.sleep(5.1)
        assert listener.endpoints == ["10.0.0.2:7", "[fd00::3]:7"]
        assert listener.left == ["talkers no longer has its address"]
    assert set(asked) == {"talkers"}


@in_virtual_time
async def test_a_failing_resolver_removes_no_replica(caplog: pytest.LogCaptureFixture) -> None:
    answers: list[Collection[str] | None] = [["10.0.0.1"], None, None, ["10.0.0.2"]]

    async def resolve(host: str) -> Collection[str]:
        answer = answers.pop(0)
        if answer is None:
            raise OSError("no such name")
        return answer

    async with _followed(DnsSource("b", DnsName("talkers", 7, poll_s=5), resolve=resolve)) as listener:
        await asyncio.sleep(10.1)
        assert listener.endpoints == ["10.0.0.1:7"]
        await asyncio.sleep(5)
        assert listener.endpoints == ["10.0.0.2:7"]
    assert [record.getMessage() for record in caplog.records] == [
        "the name talkers of the replicas of stage b cannot be resolved (no such name); the 1 known replicas remain"
    ]


async def test_an_invalid_name_is_resolved_again(caplog: pytest.LogCaptureFixture) -> None:
    async with _followed(DnsSource("b", DnsName("a" * 64 + ".svc", 7, poll_s=0.01))) as listener, asyncio.timeout(10):
        while not caplog.records:
            await asyncio.sleep(0.01)
        assert listener.members == []
    assert "cannot be resolved" in caplog.text


@in_virtual_time
async def test_a_hanging_resolver_is_asked_again(caplog: pytest.LogCaptureFixture) -> None:
    asked: list[float] = []

    async def resolve(host: str) -> Collection[str]:
        asked.append(asyncio.get_running_loop().time())
        if len(asked) == 1:
            await asyncio.Event().wait()
        return []

    async with _followed(DnsSource("b", DnsName("talkers", 7, poll_s=5), resolve=resolve)):
        await asyncio.sleep(11)
    assert len(asked) == 2
    assert "cannot be resolved (no answer)" in caplog.text


async def test_the_system_resolves_names_on_loopback() -> None:
    async with _followed(DnsSource("b", DnsName("localhost", 7))) as listener, asyncio.timeout(10):
        while not listener.members:
            await asyncio.sleep(0.01)
        assert set(listener.endpoints) <= {"127.0.0.1:7", "[::1]:7"}


@in_virtual_time
async def test_a_lease_lasts_while_it_is_renewed(pipeline: Pipeline) -> None:
    async with _registering(pipeline) as (source, listener):
        lease = source.register(_identity(pipeline))
        for _ in range(10):
            await asyncio.sleep(14)
            source.renew(lease)
        assert listener.members == [Member("b", "h:1", "b-0")]
        await asyncio.sleep(15.1)
        assert listener.members == []
        assert listener.left == ["it did not renew its lease of 15 s"]
        with pytest.raises(NotReadyError, match="has ended; register again"):
            source.renew(lease)


@in_virtual_time
async def test_a_wall_clock_that_jumps_ends_no_lease(pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    async with _registering(pipeline) as (source, listener):
        source.register(_identity(pipeline))
        for now_s in (0.0, 4e9):
            monkeypatch.setattr(time, "time", lambda now_s=now_s: now_s)
            await asyncio.sleep(7)
            assert listener.endpoints == ["h:1"]
        await asyncio.sleep(1.1)
        assert listener.endpoints == []


@in_virtual_time
async def test_a_replica_that_deregisters_leaves_at_once(pipeline: Pipeline) -> None:
    async with _registering(pipeline) as (source, listener):
        lease = source.register(_identity(pipeline))
        source.leave(lease)
        source.leave(lease)
        assert (listener.members, listener.left) == ([], ["it deregistered"])


@pytest.mark.parametrize(("broken", "left"), [(False, ["it deregistered"]), (True, [])], ids=["ended", "broken"])
async def test_a_replica_leaves_if_it_ends_its_stream(pipeline: Pipeline, broken: bool, left: list[str]) -> None:
    async def requests() -> AsyncGenerator[membership_pb2.RegisterRequest]:
        yield membership_pb2.RegisterRequest(replica=_identity(pipeline))
        caller.gone = broken

    source, caller = RegistrationSource(pipeline, lease_s=15), _Caller()
    async with _followed(source) as listener:
        with suppress(grpc.aio.InternalError):
            # The wrapper that writes the answers changes the signature.
            await cast("Any", MembershipServicer(source).Register)(requests(), caller)
        assert listener.left == left


@in_virtual_time
async def test_a_new_connection_continues_the_lease(pipeline: Pipeline) -> None:
    async with _registering(pipeline) as (source, listener):
        lease = source.register(_identity(pipeline))
        source.disconnect(lease)
        assert source.register(_identity(pipeline)) is lease
        await asyncio.sleep(14)
        assert len(listener.members) == 1
        assert listener.left == []


@in_virtual_time
async def test_a_restarted_process_replaces_its_predecessor(pipeline: Pipeline) -> None:
    async with _registering(pipeline) as (source, listener):
        former = source.register(_identity(pipeline))
        source.register(_identity(pipeline, incarnation="two"))
        assert listener.endpoints == ["h:1"]
        assert listener.left == ["another process registered under its name"]
        with pytest.raises(StaleAttemptError, match="has registered as b-0 since"):
            source.renew(former)


@in_virtual_time
async def test_a_name_in_use_is_rejected_until_its_holder_disconnects(pipeline: Pipeline) -> None:
    async with _registering(pipeline) as (source, listener):
        lease = source.register(_identity(pipeline))
        other = _identity(pipeline, incarnation="two", endpoint="h:2")
        with pytest.raises(ExistsError, match="named b-0 is registered from h:1"):
            source.register(other)
        source.disconnect(lease)
        source.register(other)
        assert listener.endpoints == ["h:2"]


_NO_COMMON = "speaks .*, but this orchestrator speaks .*; upgrade"


@pytest.mark.parametrize(
    ("fields", "reason", "problem"),
    [
        ({"pipeline": "other"}, "REPLICA_REFUSED", "is refused: its pipeline is other, expected chain.*start it from"),
        ({"generation": "other"}, "REPLICA_REFUSED", "is refused: its generation is other, expected.*start it from"),
        ({"stage": "d"}, "REPLICA_REFUSED", "is refused: pipeline 'chain' has no stage 'd'.*start it from"),
        ({"protocol": Protocol(lowest_version=2, highest_version=3)}, "NO_COMMON_VERSION", _NO_COMMON),
        ({"protocol": Protocol()}, "NO_COMMON_VERSION", _NO_COMMON),
    ],
    ids=["pipeline", "generation", "stage", "newer version", "no version"],
)
async def test_a_replica_that_does_not_fit_the_pipeline_is_rejected(
    pipeline: Pipeline, fields: dict[str, object], reason: str, problem: str
) -> None:
    async with _registering(pipeline) as (source, listener):
        with raises(NotReadyError, reason=reason, match=f"b-0 at h:1 {problem}"):
            source.register(_identity(pipeline, **fields))
        assert listener.members == []


async def test_another_generation_may_be_accepted(pipeline: Pipeline) -> None:
    async with _registering(pipeline, generations=["old"]) as (source, listener):
        source.register(_identity(pipeline, generation="old"))
        assert listener.endpoints == ["h:1"]


_LONG = "x" * 257
_INVALID = [{"replica": ""}, {"incarnation": ""}, {"endpoint": ""}, {"endpoint": "h"}, {"endpoint": "h:" + "1" * 5000}]
_INVALID += [{"endpoint": "h:\u0661"}, {"replica": _LONG}, {"incarnation": _LONG}, {"server_name": _LONG}]


@pytest.mark.parametrize("fields", _INVALID)
async def test_an_incomplete_or_endless_identity_is_rejected(pipeline: Pipeline, fields: dict[str, str]) -> None:
    async with _registering(pipeline) as (source, _):
        with raises(InvalidRequestError, reason="INVALID_REPLICA"):
            source.register(_identity(pipeline, **fields))
