import math

import numpy as np
import pytest
import torch

from stagemesh.verification.base import ForcedTokens
from stagemesh.verification.comparison import (
    NUMBER_LIMITS,
    TIE_LIMITS,
    Compared,
    ForcedChoice,
    compare_choices,
    compare_exactly,
    compare_numbers,
    compare_pixels,
)

WHAT = Compared(0, "thinker", "token_ids", "float32")
HALF = WHAT._replace(precision="bfloat16")


def test_a_difference_above_the_tie_limit_is_located() -> None:
    choices = [ForcedChoice(5, 5, 0.0), ForcedChoice(7, 8, TIE_LIMITS["float32"] / 2), ForcedChoice(1, 2, 0.5)]
    result = compare_choices(WHAT, choices)
    assert (result.verdict, result.compared, result.differing, result.difference) == ("differs", 3, 2, 0.5)
    assert "token 2: chose 1, the reference 2" in result.detail


def test_ties_are_reported_and_pass() -> None:
    tie = ForcedChoice(7, 8, TIE_LIMITS["bfloat16"] / 2)
    assert compare_choices(HALF, [ForcedChoice(5, 5, 0.0), tie]).verdict == "ties"
    assert compare_choices(WHAT, [ForcedChoice(5, 5, 0.0), tie]).verdict == "differs"


def test_rounding_may_change_one_of_twenty_tokens_in_bfloat16() -> None:
    choices = [ForcedChoice(5, 5, 0.0)] * 19
    error = ForcedChoice(7, 8, 0.5)
    assert compare_choices(HALF, [*choices, error]).verdict == "ties"
    assert compare_choices(HALF, [*choices, error, error]).verdict == "differs"
    assert compare_choices(HALF, [*choices[1:], error]).verdict == "differs"
    assert compare_choices(WHAT, [*choices, error]).verdict == "differs"


@pytest.mark.parametrize("loss", [math.inf, math.nan])
def test_a_token_that_the_reference_excludes_differs(loss: float) -> None:
    result = compare_choices(WHAT, [ForcedChoice(7, 8, loss)])
    assert result.verdict == "differs"
    assert math.isfinite(result.difference)


def test_codes_are_located_by_frame_and_group() -> None:
    choices = [ForcedChoice(at, at, 0.0) for at in range(6)]
    choices[5] = ForcedChoice(5, 9, 1.0)
    assert "frame 1, group 1" in compare_choices(WHAT, choices, groups=4).detail


def test_a_prompt_of_another_length_or_content_differs() -> None:
    ours = np.array([1, 2, 3], np.int32)
    assert compare_exactly(WHAT, ours, ours).verdict == "equal"
    assert "first at 1: 2, the reference has 7" in compare_exactly(WHAT, ours, np.array([1, 7, 3])).detail
    assert compare_exactly(WHAT, ours, ours[:2]).verdict == "differs"


def test_numbers_in_float32_differ_by_their_largest_error() -> None:
    theirs = np.zeros((3, 4), np.float32)
    ours = theirs.copy()
    ours[2, 1] = NUMBER_LIMITS["float32"] * 0.9
    assert compare_numbers(WHAT, ours, theirs).verdict == "equal"
    ours[2, 1] = NUMBER_LIMITS["float32"] * 1.1
    result = compare_numbers(WHAT, ours, theirs)
    assert (result.verdict, result.differing) == ("differs", 1)
    assert "[2, 1]" in result.detail


def test_numbers_in_bfloat16_differ_by_their_relative_norm() -> None:
    theirs = np.full(100, 8.0, np.float32)
    assert compare_numbers(HALF, theirs * (1 + NUMBER_LIMITS["bfloat16"] * 0.9), theirs).verdict == "equal"
    assert compare_numbers(HALF, theirs * (1 + NUMBER_LIMITS["bfloat16"] * 1.1), theirs).verdict == "differs"


@pytest.mark.parametrize("what", [WHAT, HALF])
def test_numbers_of_another_shape_or_not_a_number_differ(what: Compared) -> None:
    theirs = np.ones(4, np.float32)
    assert compare_numbers(what, theirs[:3], theirs).verdict == "differs"
    result = compare_numbers(what, np.array([1, 1, np.nan, 1], np.float32), theirs)
    assert result.verdict == "differs"
    assert math.isfinite(result.difference)


def test_pixels_may_differ_by_the_error_of_rounding() -> None:
    theirs = np.full((1, 2, 2, 3), 100.4 / 255, np.float32)
    ours = np.full((1, 2, 2, 3), 100, np.uint8)
    assert compare_pixels(WHAT, ours, theirs).verdict == "equal"
    ours[0, 1, 1, 2] = 101
    assert compare_pixels(WHAT, ours, theirs).verdict == "differs"


def test_forced_tokens_are_rated_by_the_logits() -> None:
    forced = ForcedTokens([2, 0])
    logits = torch.tensor([[1.0, 3.0, 4.0, -math.inf]])
    assert forced(logits, logits).argmax() == 2
    assert forced(logits, logits).argmax() == 0
    assert torch.equal(forced(logits, logits), logits)
    assert forced.choices == [ForcedChoice(2, 2, 0.0), ForcedChoice(0, 2, 0.75)]
