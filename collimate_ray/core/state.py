"""Records of groups and their indices, and the backlog: what waits, in fair order. Must not decide anything."""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from collimate_ray.core.events import OnInfraError
from collimate_ray.results import GradeResult

#: Group and index: what names a candidate among the open groups.
Key = tuple[str, int]


class IndexState(enum.Enum):
    """Where an index of an open group is; in exactly one of these after each event."""

    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"


@dataclass(slots=True, eq=False)
class IndexRecord:
    """One candidate of an open group."""

    group: GroupRecord
    index: int
    #: 64 hex characters; never changes
    seed: str
    state: IndexState = IndexState.QUEUED
    #: number of its last dispatch, from 1, among those of all indices; 0: not dispatched yet
    attempt: int = 0
    #: dispatches that count against it, lost with their session or host
    charged: int = 0
    session_deaths: int = 0
    host_deaths: int = 0
    #: the node it runs on; None unless RUNNING
    node_id: str | None = None
    #: a node that it is kept from while there is another
    avoid: str | None = None
    #: when it was last queued, seconds
    queued_at: float = 0.0
    #: how long it was queued before its last dispatch, ms
    queue_time_ms: float = 0.0
    #: None unless DONE
    result: GradeResult | None = None

    @property
    def key(self) -> Key:
        """Name of the candidate among the open groups."""
        return self.group.group_id, self.index


@dataclass(slots=True, eq=False)
class Lane:
    """Candidates that wait in line together: those of one group, or all single submissions."""

    #: key -> record, oldest first; each is QUEUED
    queue: OrderedDict[Key, IndexRecord] = field(default_factory=OrderedDict)
    #: True while it waits for company; then it is not served
    gathering: bool = False


@dataclass(slots=True, eq=False)
class GroupRecord:
    """An open group."""

    group_id: str
    #: as submitted, shape (G,)
    seeds: tuple[str, ...]
    on_infra_error: OnInfraError
    lane: Lane
    #: the timer of its deadline, or None
    timer_id: str | None = None
    #: shape (G,)
    records: list[IndexRecord] = field(default_factory=list)
    #: records that are not DONE; above 0 while the group is open
    missing: int = 0


class Backlog:
    """Lanes that wait for a node, served in turn, so that a big group does not starve the others."""

    def __init__(self) -> None:
        #: the lane of all single submissions
        self.singles = Lane()
        #: lanes in the order of their turns; exactly those with a queue that are not gathering
        self.ring: OrderedDict[Lane, None] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self.ring)

    def push(self, record: IndexRecord, now: float) -> None:
        """Put a record at the end of its lane; ``now`` in seconds."""
        record.state, record.node_id, record.queued_at = IndexState.QUEUED, None, now
        lane = record.group.lane
        lane.queue[record.key] = record
        self.offer(lane)

    def remove(self, record: IndexRecord) -> None:
        """Take a record out of its lane, if it is there."""
        lane = record.group.lane
        lane.queue.pop(record.key, None)
        if not lane.queue:
            self.ring.pop(lane, None)

    def offer(self, lane: Lane) -> None:
        """Give a lane its turn if it has something to serve; a lane that waits for its turn keeps it."""
        if lane.queue and not lane.gathering:
            self.ring.setdefault(lane)

    def pop(self) -> Lane:
        """Take the lane whose turn it is; ``offer`` or ``put_back`` it afterwards."""
        return self.ring.popitem(last=False)[0]

    def put_back(self, lanes: list[Lane]) -> None:
        """Give lanes that could not be served their turns back, in order."""
        for lane in reversed(lanes):
            self.ring[lane] = None
            self.ring.move_to_end(lane, last=False)

    def lanes(self) -> Iterator[Lane]:
        """All lanes in which something waits, that which gathers too."""
        yield from self.ring
        if self.singles.queue and self.singles not in self.ring:
            yield self.singles
