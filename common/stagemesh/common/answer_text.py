"""The text of an answer of which the user has heard only a part."""


def shorten(answer: str, *, length: int) -> str:
    """Returns the first `length` characters of an answer, without a word that is cut in the middle."""
    if length >= len(answer):
        return answer
    heard = answer[:length]
    if not answer[length].isspace():
        cut = max((index for index, character in enumerate(heard) if character.isspace()), default=0)
        heard = heard[:cut]
    return heard.rstrip()
