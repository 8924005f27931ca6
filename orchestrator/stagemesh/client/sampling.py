"""How tokens are to be picked, in a caller's arguments and in the contract's."""

import json
from collections.abc import Mapping, Sequence
from typing import TypedDict

from stagemesh.common.errors import InvalidRequestError
from stagemesh.v1 import request_pb2

_STRUCTURES = ("json_schema", "regex", "choice", "grammar")


class SamplingArguments(TypedDict, total=False):
    """How language models pick tokens; what is left out is left to the stage. `request.proto` says what each means."""

    max_tokens: int | None
    temperature: float | None
    """0 is greedy."""
    top_p: float | None
    top_k: int | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    stop: Sequence[str]
    """Texts that end the output."""
    stop_token_ids: Sequence[int]
    min_tokens: int | None
    ignore_eos: bool
    bad_words: Sequence[str]
    logprobs: int | None
    """So many alternatives with each token's log-probability; see `Tokens.logprobs`."""
    json_schema: str | Mapping[str, object] | None
    """What the output must be; at most one of this and the next three."""
    regex: str | None
    choice: Sequence[str] | None
    grammar: str | None


def sampling_to_wire(arguments: SamplingArguments) -> request_pb2.Sampling:
    """The message; raises InvalidRequestError for structures that exclude each other."""
    sampling = request_pb2.Sampling(
        max_tokens=arguments.get("max_tokens"),
        temperature=arguments.get("temperature"),
        top_p=arguments.get("top_p"),
        top_k=arguments.get("top_k"),
        min_p=arguments.get("min_p"),
        repetition_penalty=arguments.get("repetition_penalty"),
        presence_penalty=arguments.get("presence_penalty"),
        frequency_penalty=arguments.get("frequency_penalty"),
        stop=arguments.get("stop", ()),
        stop_token_ids=arguments.get("stop_token_ids", ()),
        min_tokens=arguments.get("min_tokens") or 0,
        ignore_eos=arguments.get("ignore_eos", False),
        bad_words=arguments.get("bad_words", ()),
        logprobs=arguments.get("logprobs"),
    )
    _set_structure(sampling, arguments)
    return sampling


def _set_structure(sampling: request_pb2.Sampling, arguments: SamplingArguments) -> None:
    given = [name for name in _STRUCTURES if arguments.get(name) is not None]
    if len(given) > 1:
        raise InvalidRequestError(f"{' and '.join(given)} are given; an output can have one structure")
    if (schema := arguments.get("json_schema")) is not None:
        sampling.json_schema = schema if isinstance(schema, str) else json.dumps(schema)
    if (regex := arguments.get("regex")) is not None:
        sampling.regex = regex
    if (choice := arguments.get("choice")) is not None:
        sampling.choice.CopyFrom(request_pb2.Choice(texts=choice))
    if (grammar := arguments.get("grammar")) is not None:
        sampling.grammar = grammar
