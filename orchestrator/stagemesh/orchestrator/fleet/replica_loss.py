"""The time limits after which a replica counts as lost, and the errors of calls to one replica."""

import asyncio
import re
from collections.abc import Generator
from contextlib import contextmanager
from copy import copy
from typing import TypeVar

import grpc
from google.protobuf.message import Message

from stagemesh.common.errors import Code, InternalError, InvalidRequestError, StagemeshError, UnavailableError
from stagemesh.common.wire.encoding import parse_message
from stagemesh.rpc.channels import MAX_ANSWER_FIELDS, MAX_MESSAGE_BYTES
from stagemesh.rpc.error_mapping import BROKEN, from_rpc_error, is_broken

REPLICA_LOST = "REPLICA_LOST"
STEP_PING_S, STEP_PING_TIMEOUT_S = 0.5, 0.3
"""A stopped or partitioned replica that runs a step is detected within 1.3 seconds. A replica that answers late costs
nothing, because its steps continue on a new connection.
"""
GIVE_UP_S = 15.0
"""Time in seconds after which an unreachable replica counts as ended."""
ACCEPT_S = 5.0
"""Time limit for a replica to accept a step, in seconds."""
REATTACH_S = 0.6
"""Time limit for reconnecting to an unreachable replica, in seconds.

After this time, the replica's steps are run on other replicas. A replica retains the steps of a broken connection for
longer than this time.
"""

_ANSWER = re.compile("CLIENT: Received|SERVER: Sent|trying to send")
"""The texts by which gRPC says that a message which is too large is an answer."""
_Message = TypeVar("_Message", bound=Message)


class ReplicaErrors:
    """Creates the errors of calls to one replica. The messages and metadata of the errors name the replica."""

    def __init__(self, *, stage: str, replica: str, endpoint: str) -> None:
        self.location = {"stage": stage, "replica": replica}
        self.peer = f"stage {stage!r} (replica {replica} at {endpoint})"
        self.max_message_bytes = MAX_MESSAGE_BYTES
        """The size of the largest message that the replica accepts, in bytes."""

    @contextmanager
    def mapped(self) -> Generator[None]:
        """Converts errors of gRPC calls within the block to StagemeshErrors.

        Also converts the errors of a channel that is closed before or during the call, and of an answer that cannot be
        read.
        """
        try:
            yield
        except StagemeshError:
            raise
        except grpc.aio.AioRpcError as exc:
            raise self._after_call(exc) from exc
        except grpc.aio.UsageError as exc:
            raise self._lost(f"is no longer connected ({exc})") from exc
        except asyncio.CancelledError as exc:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise self.after_stream(None, running=False) from exc
        except Exception as exc:
            raise self._unreadable(type(exc).__name__) from exc

    def read(self, kind: type[_Message], data: bytes) -> _Message:
        """Parses an answer. Raises InternalError if it is malformed or has more than `MAX_ANSWER_FIELDS` fields."""
        try:
            return parse_message(kind, data, max_fields=MAX_ANSWER_FIELDS)
        except InvalidRequestError as exc:
            raise self._unreadable(exc.message) from exc

    def after_stream(self, error: StagemeshError | None, *, running: bool) -> StagemeshError:
        """Returns the error of a step whose stream has ended with `error`.

        - `error` is None if the orchestrator closed the stream.
        - `running` is True if an event of the step had arrived.
        """
        if error is None:
            return self._lost("is no longer connected (this process ended its calls)")
        if error.code not in BROKEN:
            return copy(error).located(**self.location)
        return self._lost(
            f"{'became unreachable while the request ran' if running else 'cannot be reached'} ({error.message})"
        )

    def check_size(self, request: bytes) -> bytes:
        """Returns a serialized request. Raises InvalidRequestError if the replica does not accept such a large one."""
        if len(request) > self.max_message_bytes:
            raise InvalidRequestError(
                f"the request to {self.peer} is {len(request)} bytes long; the limit is {self.max_message_bytes}; "
                "shorten the input",
                reason="MESSAGE_TOO_LARGE",
                metadata=self.location,
            )
        return request

    def _after_call(self, exc: grpc.aio.AioRpcError) -> StagemeshError:
        error = from_rpc_error(exc, peer=self.peer).located(**self.location)
        # Whatever the code is, a status without a reason is not an answer of the replica.
        is_answer = error.metadata.get("peer") != self.peer or error.code in (
            Code.UNIMPLEMENTED,
            Code.DEADLINE_EXCEEDED,
        )
        if is_broken(exc, error, peer=self.peer) or not is_answer:
            return self._lost(f"cannot be reached ({exc.details()})")
        if error.reason == "MESSAGE_TOO_LARGE" and _ANSWER.search(exc.details() or ""):
            return self._unreadable(error.message)
        return error

    def _unreadable(self, problem: str) -> InternalError:
        return InternalError(f"{self.peer} sent an answer that cannot be read: {problem}", metadata=self.location)

    def _lost(self, event: str) -> UnavailableError:
        return UnavailableError(
            f"{self.peer} {event}; a supervised replica is restarted: try again",
            reason=REPLICA_LOST,
            metadata=self.location,
            retry_after_s=1.0,
        )
