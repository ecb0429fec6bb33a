"""The nodes: who is up, who has room, who rests. Draws a node in constant time. Must not know groups.

Source: design, Core; M. Mitzenmacher, "The Power of Two Choices in Randomized Load Balancing", IEEE TPDS
12(10), 2001.
"""

from __future__ import annotations

import enum
import random
from dataclasses import dataclass, field

from collimate_ray.core.commands import Command
from collimate_ray.core.policy import Policy
from collimate_ray.core.state import IndexRecord, IndexState, Key
from collimate_ray.core.timers import TimerKind, Timers


class Pace(enum.Enum):
    """How much an UP node is trusted with."""

    #: all its free slots
    OPEN = "open"
    #: nothing until its timer or its next verdict: it refused work for want of room
    HELD = "held"
    #: nothing until its timer or a sign of life: its daemon or actor did not answer
    SUSPECT = "suspect"
    #: one candidate, to see whether it works again
    PROBE = "probe"


@dataclass(slots=True, eq=False)
class Node:
    """One node that is up or draining; a lost one has no record."""

    node_id: str
    #: candidates it grades at once
    slots: int
    #: True: no new work
    draining: bool = False
    pace: Pace = Pace.OPEN
    #: its last pause since its last verdict, seconds; pauses double
    pause_s: float = 0.0
    #: the timer of its pace, or None
    timer_id: str | None = None
    #: the candidate that was sent to a suspect node and is still out, or None
    probe: Key | None = None
    #: key -> record, each RUNNING here
    running: dict[Key, IndexRecord] = field(default_factory=dict)
    #: place in the list of nodes with room, -1 outside
    position: int = -1
    #: True if it is counted as a node that others can turn to
    counted: bool = False

    @property
    def sound(self) -> bool:
        """Whether it can be expected to take work sooner or later."""
        return not self.draining and self.slots > 0 and self.pace in (Pace.OPEN, Pace.HELD)

    @property
    def room(self) -> int:
        """Candidates that it may be sent now."""
        if self.draining or self.pace in (Pace.HELD, Pace.SUSPECT):
            return 0
        free = max(0, self.slots - len(self.running))
        return min(free, 1) if self.pace is Pace.PROBE else free


class NodeTable:
    """All nodes, with those that have room in a list from which one is drawn in constant time."""

    def __init__(self, rng: random.Random, policy: Policy, timers: Timers, out: list[Command]) -> None:
        self._rng, self._policy, self._timers, self._out = rng, policy, timers, out
        #: node id -> node
        self.all: dict[str, Node] = {}
        #: nodes with room, in no order; node.position is the place of each
        self.free: list[Node] = []
        #: nodes that are sound
        self.sound = 0
        #: dispatches so far; the last one's number
        self.dispatches = 0

    def elsewhere(self, node_id: str | None) -> bool:
        """Tell whether there is a sound node besides this one."""
        node = self.all.get(node_id) if node_id is not None else None
        return self.sound > (1 if node is not None and node.counted else 0)

    def choose(self, avoid: str | None = None) -> Node:
        """Draw two of the nodes with room, give the one with more; the avoided one only if there is no other."""
        count = len(self.free)
        shunned = self.all.get(avoid) if avoid is not None else None
        if shunned is not None and shunned.position >= 0 and count > 1:
            count -= 1
            self._swap(shunned.position, count)
        if count == 1:
            return self.free[0]
        first = self._rng.randrange(count)
        second = self._rng.randrange(count - 1)
        one, other = self.free[first], self.free[second + (second >= first)]
        return one if one.room >= other.room else other

    def up(self, node_id: str, slots: int) -> None:
        """Take in a node, or make a known one as good as new; what runs there goes on."""
        node = self.all.setdefault(node_id, Node(node_id, slots))
        node.slots, node.draining, node.pause_s = slots, False, 0.0
        self._set_pace(node, Pace.OPEN)

    def report(self, node_id: str, slots: int) -> None:
        """Note a node's slots; a suspect one has shown that it answers."""
        node = self.all.get(node_id)
        if node is None:
            return
        node.slots = slots
        if node.pace in (Pace.SUSPECT, Pace.PROBE):
            self._set_pace(node, Pace.OPEN)
        self._refresh(node)

    def drain(self, node_id: str, draining: bool) -> None:
        """Stop or resume sending new work to a node; unknown nodes are ignored."""
        node = self.all.get(node_id)
        if node is not None:
            node.draining = draining
            self._refresh(node)

    def lose(self, node_id: str) -> list[IndexRecord]:
        """Forget a node.

        Returns:
            What ran there, still marked RUNNING.
        """
        node = self.all.pop(node_id, None)
        if node is None:
            return []
        self._timers.drop(node.timer_id)
        node.draining = True
        self._refresh(node)
        return list(node.running.values())

    def take(self, node: Node, record: IndexRecord) -> None:
        """Bind a record to a node that has room, under the next dispatch number."""
        self.dispatches += 1
        record.state, record.node_id, record.attempt = IndexState.RUNNING, node.node_id, self.dispatches
        node.running[record.key] = record
        if node.pace is Pace.PROBE:
            node.probe = record.key
            self._set_pace(node, Pace.SUSPECT)
        self._refresh(node)

    def release(self, record: IndexRecord, now: float) -> None:
        """Free the slot of a record; it is QUEUED then, in no lane. ``now`` in seconds."""
        node = self.all.get(record.node_id) if record.node_id is not None else None
        record.state, record.node_id = IndexState.QUEUED, None
        if node is None:
            return
        del node.running[record.key]
        if node.probe == record.key:
            node.probe = None
            self._await_probe(node, now)
        self._refresh(node)

    def proved(self, node: Node, verdict: bool) -> None:
        """Note that a node's daemon answers; a verdict also shows that it has room."""
        if verdict:
            node.pause_s = 0.0
        if verdict or node.pace is not Pace.HELD:
            self._set_pace(node, Pace.OPEN)

    def hold(self, node: Node, now: float) -> None:
        """Let a node that has no room rest; a node that rests already goes on resting. ``now`` in seconds."""
        if node.pace is Pace.HELD:
            return
        self._set_pace(node, Pace.HELD)
        node.pause_s = min(max(2 * node.pause_s, self._policy.hold_s), self._policy.hold_max_s)
        self._set_timer(node, TimerKind.HOLD, now + node.pause_s * self._rng.uniform(0.5, 1.0))

    def suspect(self, node: Node, now: float) -> None:
        """Send a node nothing until it shows a sign of life, or for a while. ``now`` in seconds."""
        if node.pace is not Pace.SUSPECT:
            self._set_pace(node, Pace.SUSPECT)
        self._await_probe(node, now)

    def timer_fired(self, kind: TimerKind, node_id: str) -> None:
        """End a rest: a held node is open again, a suspect one gets a probe."""
        node = self.all[node_id]
        node.timer_id = None
        self._set_pace(node, Pace.OPEN if kind is TimerKind.HOLD else Pace.PROBE)

    def _await_probe(self, node: Node, now: float) -> None:
        if node.pace is Pace.SUSPECT and node.probe is None and node.timer_id is None:
            self._set_timer(node, TimerKind.PROBE, now + self._policy.probe_s)

    def _set_timer(self, node: Node, kind: TimerKind, at: float) -> None:
        command = self._timers.set(kind, node.node_id, at)
        node.timer_id = command.timer_id
        self._out.append(command)

    def _set_pace(self, node: Node, pace: Pace) -> None:
        if node.pace is not pace:
            self._timers.drop(node.timer_id)
            node.pace, node.timer_id = pace, None
            if pace is not Pace.SUSPECT:
                node.probe = None
        self._refresh(node)

    def _refresh(self, node: Node) -> None:
        if node.sound != node.counted:
            node.counted = not node.counted
            self.sound += 1 if node.counted else -1
        if (node.room > 0) == (node.position >= 0):
            return
        if node.position < 0:
            node.position = len(self.free)
            self.free.append(node)
        else:
            self._swap(node.position, len(self.free) - 1)
            self.free.pop().position = -1

    def _swap(self, one: int, other: int) -> None:
        free = self.free
        free[one], free[other] = free[other], free[one]
        free[one].position, free[other].position = one, other
