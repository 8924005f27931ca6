"""The sleep state of an engine that implements `abilities.SleepControl`."""

from collections.abc import Sequence

from stagemesh.common.errors import InvalidRequestError, NotReadyError


class SleepState:
    """The tags of the parts of an engine that are asleep."""

    def __init__(self, *, stage: str) -> None:
        self.tags: set[str] = set()
        self._stage = stage

    def asleep(self) -> Sequence[str]:
        """Returns the tags of the parts that are asleep, sorted."""
        return sorted(self.tags)

    def check_awake(self) -> None:
        """Raises NotReadyError if any part is asleep."""
        if self.tags:
            raise NotReadyError(
                f"the engine of stage {self._stage} is asleep ({', '.join(self.asleep())}); wake it first",
                metadata={"asleep": ",".join(self.asleep())},
            )

    def select(self, tags: Sequence[str]) -> set[str]:
        """Returns `tags`, or the tags of all sleeping parts if `tags` is empty.

        Raises InvalidRequestError if one of the tags is not asleep.
        """
        wanted = set(tags) or set(self.tags)
        if not wanted <= self.tags:
            raise InvalidRequestError(
                f"stage {self._stage}: {', '.join(sorted(wanted - self.tags))} is not asleep; asleep: "
                f"{', '.join(self.asleep()) or 'nothing'}",
                reason="UNKNOWN_TAG",
            )
        return wanted
