"""What happened: the facts that the driver tells the scheduler. Must not do anything itself.

Source: design, Core. An event is a past fact about a group, an index of a group, a node or a timer. An answer
names the dispatch that it answers (``attempt``), so that a late one of a superseded dispatch is recognised.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from collimate_ray.results import GradeResult

#: When a member ends without a verdict: the group fails as a whole, or goes on with that member not valid.
OnInfraError = Literal["raise", "mask"]


@dataclass(frozen=True, slots=True)
class GroupSubmitted:
    """A group came in. Ignored if a group of that name is open.

    Attributes:
        group_id: Name of the group.
        seeds: Shape (G,), 64 hex characters each; fixed for ever. Empty: the group completes at once.
        deadline: Absolute, seconds in the clock of ``now``; None: none.
        on_infra_error: ``raise`` or ``mask``.
        single: Gather with other single submissions for up to ``Policy.gather_s``, so that they share calls.
    """

    group_id: str
    seeds: tuple[str, ...]
    deadline: float | None = None
    on_infra_error: OnInfraError = "raise"
    single: bool = False


@dataclass(frozen=True, slots=True)
class IndexDone:
    """A node answered an index with a verdict.

    Attributes:
        group_id: The group.
        index: Place in the group, from 0.
        attempt: That of the ``DispatchItem`` which this answers.
        node_id: The node that answers.
        result: The grade; ``attempt``, ``node_id`` and ``queue_time_ms`` are filled in by the scheduler.
    """

    group_id: str
    index: int
    attempt: int
    node_id: str
    result: GradeResult


@dataclass(frozen=True, slots=True)
class IndexFailed:
    """A node answered an index without a verdict, or the call to the node failed.

    Attributes:
        group_id: The group.
        index: Place in the group, from 0.
        attempt: That of the ``DispatchItem`` which this answers.
        node_id: The node that answers, or that was called.
        error: An ``InfraError`` (its class decides what happens) or any other error: then the call or the
            spec is wrong, and the group fails with that very error.
    """

    group_id: str
    index: int
    attempt: int
    node_id: str
    error: Exception


@dataclass(frozen=True, slots=True)
class NodeUp:
    """A node is ready for work: new, back, or healthy again, whatever it was before.

    What runs on a known node goes on. An actor that was started anew has forgotten its work: say ``NodeLost``
    first.

    Attributes:
        node_id: The node.
        slots: Candidates it grades at once, at least 0.
    """

    node_id: str
    slots: int


@dataclass(frozen=True, slots=True)
class NodeDraining:
    """A node takes no new work; what runs there goes on. Unknown nodes are ignored."""

    node_id: str


@dataclass(frozen=True, slots=True)
class NodeUndrained:
    """A draining node takes work again. Ignored for nodes that are unknown or not draining."""

    node_id: str


@dataclass(frozen=True, slots=True)
class NodeLost:
    """A node, its actor or the link to it died: what runs there is graded elsewhere. Ignored if unknown."""

    node_id: str


@dataclass(frozen=True, slots=True)
class NodeReport:
    """A node told how it is: it answers, so it is not suspect. Unknown nodes are ignored.

    Attributes:
        node_id: The node.
        slots: Candidates it grades at once, at least 0.
    """

    node_id: str
    slots: int


@dataclass(frozen=True, slots=True)
class TimerFired:
    """The moment of a ``SetTimer`` came. Timers nobody waits for any more are ignored."""

    timer_id: str


@dataclass(frozen=True, slots=True)
class GroupCancelled:
    """The caller wants a group no more. Unknown groups are ignored."""

    group_id: str


Event = (
    GroupSubmitted
    | IndexDone
    | IndexFailed
    | NodeUp
    | NodeDraining
    | NodeUndrained
    | NodeLost
    | NodeReport
    | TimerFired
    | GroupCancelled
)
