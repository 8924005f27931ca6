"""The prompts with which the model learns the digits."""

NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
WORDINGS = (
    "the digit {name}",
    "the digit {numeral}",
    "the number {name}",
    "a handwritten {name}",
    "a picture of the digit {name}",
    "{name}",
    "{numeral}",
)
NO_PROMPTS = ("", " ")
"""The empty prompts for guidance. The modular pipeline uses the first if a request has no negative prompt."""


def prompt(digit: int, wording: str = WORDINGS[0]) -> str:
    """Returns the prompts for a digit, such as "the digit seven"."""
    return wording.format(name=NAMES[digit], numeral=digit)


def all_prompts() -> list[str]:
    """Returns the prompts of digit 0 in the order of WORDINGS, then those of 1 and so on, and NO_PROMPTS last."""
    return [prompt(digit, wording) for digit in range(len(NAMES)) for wording in WORDINGS] + list(NO_PROMPTS)
