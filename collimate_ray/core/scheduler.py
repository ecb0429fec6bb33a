"""The scheduler: what runs where, and when a group has ended. Events in, commands out.

Must not touch Ray, sockets, clocks, threads or global randomness, and never sees a completion or a spec. The same
events and seed give the same commands. Source: design, Core and Verdicts.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any, NoReturn

from collimate_ray.core.answers import Answers
from collimate_ray.core.commands import Command
from collimate_ray.core.events import (
    Event,
    GroupCancelled,
    GroupSubmitted,
    IndexDone,
    IndexFailed,
    NodeDraining,
    NodeLost,
    NodeReport,
    NodeUndrained,
    NodeUp,
    TimerFired,
)
from collimate_ray.core.groups import Groups
from collimate_ray.core.invariants import check
from collimate_ray.core.nodes import NodeTable
from collimate_ray.core.placement import place
from collimate_ray.core.policy import Policy
from collimate_ray.core.timers import TimerKind, Timers
from collimate_ray.errors import GroupFailed

_DEFAULT = Policy()


class Scheduler:
    """The state of all open groups and of all nodes.

    Args:
        rng: Its only randomness: choice of nodes, jitter of pauses.
        policy: The numbers it goes by.
    """

    def __init__(self, rng: random.Random, policy: Policy = _DEFAULT) -> None:
        self._policy = policy
        #: commands of the events at hand; empty between calls
        self._out: list[Command] = []
        self._timers = Timers()
        self._nodes = NodeTable(rng, policy, self._timers, self._out)
        self._groups = Groups(self._nodes, self._timers, self._out, policy)
        self._answers = Answers(self._groups, self._nodes, policy)

    def handle(self, event: Event, now: float) -> list[Command]:
        """Take in one event.

        Args:
            event: What happened.
            now: Monotonic seconds, never less than before.

        Returns:
            What to do, in order.
        """
        return self.handle_all((event,), now)

    def handle_all(self, events: Iterable[Event], now: float) -> list[Command]:
        """Take in events that came together: the slots they free are filled together, in larger shards.

        Args:
            events: What happened, in order.
            now: Monotonic seconds, never less than before.

        Returns:
            What to do, in order.
        """
        for event in events:
            self._apply(event, now)
        self._place(now)
        commands = self._out.copy()
        self._out.clear()
        return commands

    def story(self, group_id: str) -> list[str]:
        """Tell why anything of a group moved.

        Returns:
            Its last 200 lines, oldest first; empty unless it is open or among the 100 that ended last.
        """
        return self._groups.story.of(group_id)

    def stats(self) -> dict[str, Any]:
        """Count what is there, JSON-able: open groups, members that wait and run, and each node's state."""
        nodes = self._nodes.all.values()
        return {
            "groups": len(self._groups.open),
            "queued": sum(len(lane.queue) for lane in self._groups.backlog.lanes()),
            "running": sum(len(node.running) for node in nodes),
            "nodes": {
                node.node_id: {
                    "state": "draining" if node.draining else "up",
                    "pace": node.pace.value,
                    "slots": node.slots,
                    "running": len(node.running),
                }
                for node in nodes
            },
        }

    def validate(self) -> None:
        """Check all invariants; for tests: the cost grows with the state.

        Raises:
            InvariantViolated: One does not hold.
        """
        check(self._groups, self._nodes, self._timers)

    def _apply(self, event: Event, now: float) -> None:
        match event:
            case GroupSubmitted():
                self._groups.submit(event, now)
            case IndexDone():
                self._answers.done(event, now)
            case IndexFailed():
                self._answers.failed(event, now)
            case NodeUp():
                self._nodes.up(event.node_id, event.slots)
            case NodeDraining():
                self._nodes.drain(event.node_id, True)
            case NodeUndrained():
                self._nodes.drain(event.node_id, False)
            case NodeLost():
                self._answers.lost(event.node_id, now)
            case NodeReport():
                self._nodes.report(event.node_id, event.slots)
            case TimerFired():
                self._fired(event.timer_id, now)
            case GroupCancelled():
                self._cancelled(event.group_id, now)
            case _:
                _never(event)

    def _fired(self, timer_id: str, now: float) -> None:
        waited = self._timers.fired(timer_id)
        if waited is None:
            return
        kind, subject = waited
        if kind is TimerKind.GATHER:
            self._groups.gathered()
        elif kind is TimerKind.DEADLINE:
            self._groups.deadline(self._groups.open[subject], now)
        else:
            self._nodes.timer_fired(kind, subject)

    def _cancelled(self, group_id: str, now: float) -> None:
        group = self._groups.open.get(group_id)
        if group is not None:
            self._groups.fail(group, GroupFailed("cancelled"), now)

    def _place(self, now: float) -> None:
        for shard in place(self._groups.backlog, self._nodes, self._policy, now):
            self._out.append(shard)
            for item in shard.items:
                text = f"[{item.index}] to node {shard.node_id}, dispatch {item.attempt}"
                self._groups.story.tell(item.group_id, now, text)


def _never(event: NoReturn) -> NoReturn:
    raise TypeError(f"event: expected one of core.events, found {type(event).__name__}")
