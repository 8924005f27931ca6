"""What of an engine sleeps, for engines that can (`abilities.SleepControl`)."""

from collections.abc import Sequence

from stagemesh.common.errors import InvalidRequestError, NotReadyError


class Sleepers:
    """The parts of an engine that sleep, by the engine's own words."""

    def __init__(self, *, stage: str) -> None:
        self.tags: set[str] = set()
        self._stage = stage

    def check_awake(self) -> None:
        """Raises NotReadyError while anything sleeps."""
        if self.tags:
            raise NotReadyError(
                f"the engine of stage {self._stage} sleeps ({', '.join(self.listed())}); wake it first",
                metadata={"asleep": ",".join(self.listed())},
            )

    def listed(self) -> Sequence[str]:
        """See `SleepControl.asleep`."""
        return sorted(self.tags)

    def named(self, tags: Sequence[str]) -> set[str]:
        """Those that are to be woken, all where none is named; raises InvalidRequestError for what does not sleep."""
        wanted = set(tags) or set(self.tags)
        if not wanted <= self.tags:
            raise InvalidRequestError(
                f"stage {self._stage}: {', '.join(sorted(wanted - self.tags))} does not sleep; asleep: "
                f"{', '.join(self.listed()) or 'nothing'}",
                reason="UNKNOWN_TAG",
            )
        return wanted
