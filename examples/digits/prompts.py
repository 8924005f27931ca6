"""The prompts that the model is trained on."""

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
"""Negative prompts for guidance. The modular pipeline uses the first one if a request has no negative prompt."""


def prompt(digit: int, wording: str = WORDINGS[0]) -> str:
    """Returns a prompt for the digit, such as "the digit seven"."""
    return wording.format(name=NAMES[digit], numeral=digit)


def all_prompts() -> list[str]:
    """Returns all prompts: for each digit from 0 to 9 the prompts in the order of WORDINGS, then NO_PROMPTS."""
    return [prompt(digit, wording) for digit in range(len(NAMES)) for wording in WORDINGS] + list(NO_PROMPTS)
