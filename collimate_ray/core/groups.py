"""The open groups: how one begins and the ways in which it ends, each exactly once. Must not choose nodes.

Source: design, Core and Verdicts: a group is never shortened; a member without a verdict is never a reward.
"""

from __future__ import annotations

from collimate_ray.core.commands import Cancel, Command, CompleteGroup, FailGroup
from collimate_ray.core.events import GroupSubmitted
from collimate_ray.core.nodes import NodeTable
from collimate_ray.core.policy import Policy
from collimate_ray.core.state import Backlog, GroupRecord, IndexRecord, IndexState, Lane
from collimate_ray.core.story import Story
from collimate_ray.core.timers import TimerKind, Timers
from collimate_ray.errors import GroupFailed, InfraError
from collimate_ray.results import GradeResult, GroupResult, infra_failure


class Groups:
    """All open groups and what of them waits.

    Args:
        nodes: Where slots are freed when a group ends.
        timers: Where deadlines are set.
        out: Where commands go.
        policy: Has ``gather_s``.
    """

    def __init__(self, nodes: NodeTable, timers: Timers, out: list[Command], policy: Policy) -> None:
        self._nodes, self._timers, self._out, self._policy = nodes, timers, out, policy
        self.story = Story()
        #: group id -> group; each has a member that is not DONE
        self.open: dict[str, GroupRecord] = {}
        #: what waits for a node
        self.backlog = Backlog()

    def submit(self, event: GroupSubmitted, now: float) -> None:
        """Open a group, unless one of that name is open; an empty one completes at once."""
        if event.group_id in self.open:
            return
        if not event.seeds:
            self._out.append(CompleteGroup(event.group_id, ()))
            return
        group = GroupRecord(event.group_id, event.seeds, event.on_infra_error, self._lane(event.single, now))
        group.records = [IndexRecord(group, index, seed) for index, seed in enumerate(event.seeds)]
        group.missing = len(group.records)
        self.open[event.group_id] = group
        self.tell(group, now, f"submitted: {group.missing} members, {event.on_infra_error}")
        for record in group.records:
            self.backlog.push(record, now)
        self._set_deadline(group, event.deadline, now)

    def tell(self, group: GroupRecord, now: float, text: str) -> None:
        """Add a line to a group's story."""
        self.story.tell(group.group_id, now, text)

    def gathered(self) -> None:
        """Serve the single submissions that waited for company."""
        self.backlog.singles.gathering = False
        self.backlog.offer(self.backlog.singles)

    def deadline(self, group: GroupRecord, now: float) -> None:
        """End a group that has used up its time."""
        count = len(group.records)
        text = f"deadline reached with {count - group.missing} of {count} members graded"
        if group.on_infra_error == "mask":
            self._complete(group, text, now)
        else:
            self.fail(group, GroupFailed(text), now)

    def requeue(self, record: IndexRecord, now: float) -> None:
        """Let a released record wait for a node again."""
        self.backlog.push(record, now)

    def finish(self, record: IndexRecord, result: GradeResult, now: float) -> None:
        """Note a released record's result; the last one completes its group."""
        record.state, record.result = IndexState.DONE, result
        record.group.missing -= 1
        if not record.group.missing:
            self._complete(record.group, "all members graded", now)

    def no_verdict(self, record: IndexRecord, node_id: str, error: InfraError, now: float) -> None:
        """Give up a released record: its group fails, or goes on with a member that is not valid."""
        name = type(error).__name__
        known = {"seed": record.seed, "node_id": node_id, "attempt": record.charged}
        result = infra_failure(name, queue_time_ms=record.queue_time_ms, **known)
        if record.group.on_infra_error == "mask":
            self.tell(record.group, now, f"[{record.index}] has no verdict: {name}")
            self.finish(record, result, now)
            return
        record.result = result
        text = f"member {record.index}: {name}: {error}"
        self.fail(record.group, GroupFailed(text, node_id, error.admitted, error.retriable), now)

    def fail(self, group: GroupRecord, error: Exception, now: float) -> None:
        """Fail a group; ``GroupFailed`` is given its partial result, any other error goes out as it is."""
        if isinstance(error, GroupFailed):
            partial = GroupResult.of(group.group_id, _results(group))
            error = GroupFailed(error.message, error.node_id, error.admitted, error.retriable, partial)
        self._close(group, f"failed: {type(error).__name__}", now)
        self._out.append(FailGroup(group.group_id, error))

    def _complete(self, group: GroupRecord, why: str, now: float) -> None:
        self._close(group, f"completed: {why}", now)
        self._out.append(CompleteGroup(group.group_id, _results(group)))

    def _close(self, group: GroupRecord, text: str, now: float) -> None:
        self.tell(group, now, text)
        self.story.end(group.group_id)
        self._timers.drop(group.timer_id)
        del self.open[group.group_id]
        self._cancel(group, now)
        for record in group.records:
            self.backlog.remove(record)

    def _cancel(self, group: GroupRecord, now: float) -> None:
        """Free the slots of what still runs, and have it stopped where the node is there to be told."""
        where: dict[str, list[tuple[int, int]]] = {}
        for record in group.records:
            if record.node_id is not None:
                where.setdefault(record.node_id, []).append((record.index, record.attempt))
                self._nodes.release(record, now)
        for node_id, items in where.items():
            if node_id in self._nodes.all:
                self._out.append(Cancel(node_id, group.group_id, tuple(items)))

    def _lane(self, single: bool, now: float) -> Lane:
        lane = self.backlog.singles if single else Lane()
        if single and not lane.queue and not lane.gathering:
            lane.gathering = True
            self._out.append(self._timers.set(TimerKind.GATHER, "", now + self._policy.gather_s))
        return lane

    def _set_deadline(self, group: GroupRecord, deadline: float | None, now: float) -> None:
        if deadline is None:
            return
        if deadline <= now:
            self.deadline(group, now)
            return
        timer = self._timers.set(TimerKind.DEADLINE, group.group_id, deadline)
        group.timer_id = timer.timer_id
        self._out.append(timer)


def _results(group: GroupRecord) -> tuple[GradeResult, ...]:
    """Results of all members, in order; those without one are not valid."""
    return tuple(record.result or _missing(record) for record in group.records)


def _missing(record: IndexRecord) -> GradeResult:
    return infra_failure("GroupFailed", seed=record.seed, attempt=record.charged)
