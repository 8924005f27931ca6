"""Sends arguments of features to vLLM's other processes together with a request, in `SamplingParams.extra_args`.

An argument is a msgspec struct. It is converted to built-in types and stored under the name of its class. This module
does not import vLLM.
"""

from typing import TYPE_CHECKING, TypeVar

import msgspec

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.v1.core.sched.output import SchedulerOutput

T = TypeVar("T", bound=msgspec.Struct)


def set_argument(params: "SamplingParams", argument: msgspec.Struct) -> None:
    """Adds an argument to a request's sampling parameters. Replaces an earlier argument of the same class."""
    arguments = params.extra_args or {}
    params.extra_args = {**arguments, _key(type(argument)): msgspec.to_builtins(argument)}


def get_argument(params: "SamplingParams | None", kind: type[T]) -> T | None:
    """Returns the argument of class `kind` from a request's sampling parameters, or None if there is none."""
    arguments = params.extra_args if params is not None else None
    if not arguments or _key(kind) not in arguments:
        return None
    return msgspec.convert(arguments[_key(kind)], kind)


def track_arguments(known: dict[str, T], step: "SchedulerOutput", kind: type[T]) -> None:
    """Updates `known`, which contains the arguments of class `kind` of the running requests, by request id.

    Adds the arguments of the step's new requests, and removes the arguments of finished requests.
    """
    for request_id in step.finished_req_ids:
        known.pop(request_id, None)
    for new in step.scheduled_new_reqs:
        if (argument := get_argument(new.sampling_params, kind)) is not None:
            known[new.req_id] = argument


def _key(kind: type[msgspec.Struct]) -> str:
    return f"stagemesh.{kind.__name__}"
