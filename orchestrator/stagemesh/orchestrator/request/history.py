"""What is remembered of requests that ended, when their outputs are long gone."""

from collections.abc import Iterator

from stagemesh.orchestrator.request.timeline import Timeline


class History:
    """The time lines of the requests that ended last, at most `keep` of them; a few kilobytes each."""

    def __init__(self, *, keep: int = 512) -> None:
        self._keep = keep
        self._timelines: dict[str, Timeline] = {}

    def __iter__(self) -> Iterator[Timeline]:
        return iter(self._timelines.values())

    def find(self, request_id: str) -> Timeline | None:
        """That of the request of this id which ended last."""
        return self._timelines.get(request_id)

    def add(self, timeline: Timeline) -> None:
        """A request has ended."""
        self._timelines.pop(timeline.request_id, None)
        self._timelines[timeline.request_id] = timeline
        if len(self._timelines) > self._keep:
            del self._timelines[next(iter(self._timelines))]
