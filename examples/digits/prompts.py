"""The words that the model learns a digit by."""

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
"""What guidance leads away from: the modular pipeline takes the first where a request says nothing."""


def prompt(digit: int, wording: str = WORDINGS[0]) -> str:
    """What asks for the digit, such as "the digit seven"."""
    return wording.format(name=NAMES[digit], numeral=digit)


def all_prompts() -> list[str]:
    """Those of digit 0 in the order of WORDINGS, then those of 1 and so on, and NO_PROMPTS last."""
    return [prompt(digit, wording) for digit in range(len(NAMES)) for wording in WORDINGS] + list(NO_PROMPTS)
