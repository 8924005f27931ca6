"""What vLLM says of a request, as what the stage emits."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from stagemesh.common.errors import InvalidRequestError, UnavailableError
from stagemesh.common.tensors import Array
from stagemesh.connectors.edge import Packet
from stagemesh.services.engines.base import Emission, Task, TokenLogprobs
from stagemesh.services.engines.vllm.sampling import TOKEN_IDS, is_wanted

if TYPE_CHECKING:
    from vllm.logprobs import Logprob
    from vllm.outputs import CompletionOutput


def emission(output: "CompletionOutput", task: Task) -> Emission | None:
    """What is new in `output`; None for nothing.

    Tokens come with a text, if only an empty one: who takes both finds both in a packet.
    """
    tokens = list(output.token_ids) if is_wanted(task, TOKEN_IDS) else []
    if not output.text and not tokens:
        return None
    tensors: dict[str, Array] = {"text": np.frombuffer(output.text.encode(), np.uint8)}
    if not tokens:
        return Emission(Packet(tensors))
    tensors[TOKEN_IDS] = np.array(tokens, np.int32)
    return Emission(Packet(tensors), _logprobs(output, tokens, alternatives=task.sampling.logprobs))


def check_end(output: "CompletionOutput", task: Task, *, stage: str) -> None:
    """Raises what a request failed with that vLLM ended by an error."""
    if output.finish_reason != "error":
        return
    if task.sampling.structure is not None:
        raise InvalidRequestError(
            f"stage {stage}: no token is left that would fulfil the {task.sampling.structure.kind}, or it is too large "
            "to be followed; simplify it, or leave bad_words out",
            reason="INVALID_SAMPLING",
        )
    raise UnavailableError(f"stage {stage}: vLLM ended the request by an error; its own log says why")


def _logprobs(output: "CompletionOutput", tokens: list[int], *, alternatives: int | None) -> tuple[TokenLogprobs, ...]:
    if alternatives is None or not output.logprobs:
        return ()
    pairs = zip(tokens, output.logprobs, strict=True)
    return tuple(_of_token(token, known, alternatives=alternatives) for token, known in pairs if known is not None)


def _of_token(token: int, known: "Mapping[int, Logprob]", *, alternatives: int) -> TokenLogprobs:
    ranked = sorted(known.items(), key=lambda item: item[1].rank or 0)[:alternatives]
    return TokenLogprobs(
        known[token].logprob, tuple(each for each, _ in ranked), tuple(logprob.logprob for _, logprob in ranked)
    )
