"""Why anything moved: a bounded story of each group, for people. Must not hold candidate text, seeds or specs."""

from __future__ import annotations

from collections import OrderedDict, deque

#: Lines kept of a group: the last of them tell why it ended, and a group that loops must not fill the memory.
LINES = 200

#: Ended groups whose story is kept: enough to ask after a failed step (some 64 groups).
ENDED = 100


class Story:
    """Lines of open groups, and of the groups that ended last."""

    def __init__(self) -> None:
        self._open: dict[str, deque[str]] = {}
        self._ended: OrderedDict[str, deque[str]] = OrderedDict()

    def tell(self, group_id: str, now: float, text: str) -> None:
        """Add a line to an open group's story; ``now`` in seconds."""
        lines = self._open.get(group_id)
        if lines is None:
            lines = self._open[group_id] = deque(maxlen=LINES)
        lines.append(f"{now:.3f} {text}")

    def end(self, group_id: str) -> None:
        """Move a group's story to those of ended groups, in place of an earlier one of that name."""
        self._ended.pop(group_id, None)
        self._ended[group_id] = self._open.pop(group_id)
        if len(self._ended) > ENDED:
            self._ended.popitem(last=False)

    def of(self, group_id: str) -> list[str]:
        """Give a group's lines, oldest first; empty if it is unknown or long gone."""
        return list(self._open.get(group_id) or self._ended.get(group_id) or ())
