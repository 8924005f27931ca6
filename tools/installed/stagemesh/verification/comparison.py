"""Compares the outputs of a stage with those of its reference implementation.

docs/verifying.md states the rules. Both compute in the same precision, in which they round differently.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from stagemesh.common.wire.tensors import Array
from stagemesh.verification.job import Comparison, Verdict

TIE_LIMITS = {"float32": 1e-4, "float16": 2**-7, "bfloat16": 2**-4}
"""The largest difference between the logits of two tokens that are a tie, relative to the largest logit. One limit for
each precision.
"""
NUMBER_LIMITS = {"float32": 1e-4, "float16": 0.0125, "bfloat16": 0.1}
"""The largest allowed difference of numbers for each precision. `compare_numbers` defines the difference."""
TOKENS_PER_ERROR = 20
"""In a lower precision than float32, one of this number of tokens may lose more than a tie.

Rounding can make a model choose other experts for a token, which changes the logits of this token by much more.
"""
_LARGEST = 1e9
"""Replaces an infinite difference."""


class ForcedChoice(NamedTuple):
    """A token that the stage chose, and the rating of the reference at this position after the same tokens.

    `preferred` is the most probable token of the reference. `loss` is the difference between the logits of both tokens,
    relative to the largest logit.
    """

    chosen: int
    preferred: int
    loss: float


class Compared(NamedTuple):
    """One output of a stage for one request. `precision` is the data type of the less precise side."""

    request: int
    stage: str
    output: str
    precision: str

    def skip(self, detail: str) -> Comparison:
        """Returns the result if the output cannot be compared. `detail` states why, and the remedy."""
        return Comparison(self.request, self.stage, self.output, "skipped", detail=detail)

    def differ(self, detail: str) -> Comparison:
        """Returns the result if the output is wrong as a whole."""
        return Comparison(self.request, self.stage, self.output, "differs", detail=detail)


def compare_choices(what: Compared, choices: Sequence[ForcedChoice], *, groups: int = 1) -> Comparison:
    """Compares greedy choices of tokens, or of codes in frames of `groups` codes each.

    The choice of another token than the preferred one is a tie if the reference's loss is within the limit. Below
    float32, `TOKENS_PER_ERROR` allows exceptions.
    """
    limit = TIE_LIMITS[what.precision]
    others = [at for at, choice in enumerate(choices) if choice.chosen != choice.preferred]
    errors = [at for at in others if not choices[at].loss <= limit]
    allowed = 0 if what.precision == "float32" else len(choices) // TOKENS_PER_ERROR
    verdict: Verdict = "differs" if len(errors) > allowed else "ties" if others else "equal"
    detail = ""
    if others:
        at = (errors or others)[0]
        place = f"token {at}" if groups == 1 else f"frame {at // groups}, group {at % groups}"
        chosen, preferred, loss = choices[at]
        detail = f"first at {place}: chose {chosen}, the reference {preferred} (relative loss {loss:.1e})"
    largest = max((_finite(choices[at].loss) for at in others), default=0.0)
    return Comparison(*what[:3], verdict, len(choices), len(others), largest, limit, detail)


def compare_exactly(what: Compared, ours: Array, theirs: Array) -> Comparison:
    """Compares numbers that do not depend on rounding, such as the tokens of the prompt."""
    if ours.shape != theirs.shape:
        return what.differ(f"{_shape(ours)}, the reference has {_shape(theirs)}")
    differing = np.flatnonzero(ours != theirs)
    detail = ""
    if len(differing):
        at = int(differing[0])
        detail = f"first at {at}: {ours.flat[at]}, the reference has {theirs.flat[at]}"
    verdict: Verdict = "differs" if len(differing) else "equal"
    return Comparison(*what[:3], verdict, ours.size, len(differing), detail=detail)


def compare_numbers(what: Compared, ours: Array, theirs: npt.NDArray[np.float32]) -> Comparison:
    """Compares hidden states, [rows, width], or a waveform, [samples].

    In float32, the difference is the largest one of a value, relative to the largest value of the reference if that is
    above 1. In a lower precision, it is the norm of all differences relative to the norm of the reference.
    """
    if ours.shape != theirs.shape:
        return what.differ(f"{_shape(ours)}, the reference has {_shape(theirs)}")
    errors, limit = np.abs(ours.astype(np.float32) - theirs), NUMBER_LIMITS[what.precision]
    if what.precision == "float32":
        difference = errors.max(initial=0) / max(1.0, np.abs(theirs).max(initial=0))
    else:
        difference = np.linalg.norm(errors) / max(np.linalg.norm(theirs), np.finfo(np.float32).tiny)
    # A difference that is not a number is above the limit.
    verdict: Verdict = "equal" if difference <= limit else "differs"
    detail = "" if verdict == "equal" else _describe_largest(errors)
    differing = int((errors > limit).sum())
    return Comparison(*what[:3], verdict, ours.size, differing, _finite(float(difference)), limit, detail)


def compare_pixels(what: Compared, ours: npt.NDArray[np.uint8], theirs: npt.NDArray[np.float32]) -> Comparison:
    """Compares frames, [frames, height, width, 3]. `ours` has 256 levels, `theirs` are numbers from 0 to 1."""
    rounded = ours.astype(np.float32) / 255
    if ours.shape != theirs.shape:
        return what.differ(f"{_shape(ours)}, the reference has {_shape(theirs)}")
    if what.precision != "float32":
        return compare_numbers(what, rounded, theirs)
    # Half a level is the error of rounding.
    errors = np.maximum(np.abs(rounded - theirs) - 0.5 / 255, 0)
    return compare_numbers(what, errors, np.zeros_like(errors))


def _finite(difference: float) -> float:
    return float(np.nan_to_num(difference, nan=_LARGEST, posinf=_LARGEST))


def _shape(array: Array) -> str:
    return f"the shape is {list(array.shape)}"


def _describe_largest(errors: npt.NDArray[np.float32]) -> str:
    at = np.unravel_index(int(np.argmax(errors)), errors.shape)
    return f"largest at {[int(index) for index in at]}: {errors[at]:.1e}"
