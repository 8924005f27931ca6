"""Opens the media files in stores to which the prompt of a step refers."""

from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import replace

from stagemesh.common.errors import InvalidRequestError, UnsupportedError
from stagemesh.services.engines.base import Conversation, MediaFile, Part, Prompt, RawPrompt, media_of
from stagemesh.services.media.store import FetchedFile, MediaStore


@asynccontextmanager
async def opened_media(prompt: Prompt | None, store: MediaStore | None) -> AsyncGenerator[Prompt | None]:
    """Yields the prompt with all of its stored files opened and checked. Closes them when the block is exited.

    `store` is None if the pipeline has no store. Raises UnsupportedError if the prompt refers to a file nevertheless,
    InvalidRequestError (INVALID_MEDIA) if a file is empty, and the errors of `MediaStore.fetch`.
    """
    with ExitStack() as stack:
        opened = dict[int, MediaFile]()
        for medium in media_of(prompt):
            if isinstance(medium, MediaFile) and medium.reference is not None:
                file = await _fetch(medium, store)
                stack.callback(file.close)
                opened[id(medium)] = replace(medium, stored=file)
        yield _with_media(prompt, opened) if opened else prompt


async def _fetch(medium: MediaFile, store: MediaStore | None) -> FetchedFile:
    assert medium.reference is not None, "the caller has checked it"
    if store is None:
        raise UnsupportedError(
            "this stage has no store for media; send the file inline, or add `media:` to the pipeline file"
        )
    file = await store.fetch(medium.reference)
    if not file.size_bytes:
        file.close()
        raise InvalidRequestError(f"{medium.reference.uri} is empty; omit it", reason="INVALID_MEDIA")
    return file


def _with_media(prompt: Prompt | None, opened: dict[int, MediaFile]) -> Prompt | None:
    def replaced(parts: Iterable[Part]) -> Sequence[Part]:
        return tuple(opened.get(id(part), part) for part in parts)

    match prompt:
        case Conversation():
            messages = tuple(replace(each, parts=replaced(each.parts)) for each in prompt.messages)
            return replace(prompt, messages=messages)
        case RawPrompt():
            return replace(prompt, media=tuple(part for part in replaced(prompt.media) if not isinstance(part, str)))
        case _:
            return prompt
