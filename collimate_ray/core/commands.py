"""What to do: the orders that the scheduler gives its driver. Must not do anything itself.

Source: design, Core. The driver obeys in order. It may drop an order that it can't carry out only by telling
so with an event (``IndexFailed`` for each item of a ``Dispatch``, or ``NodeLost``).
"""

from __future__ import annotations

from dataclasses import dataclass

from collimate_ray.results import GradeResult


@dataclass(frozen=True, slots=True)
class DispatchItem:
    """One candidate of a shard.

    Attributes:
        group_id: Its group.
        index: Place in the group, from 0.
        attempt: Number of this dispatch, from 1, growing, never used twice by a scheduler (a group's name may
            be used again); the answer carries it. Not ``GradeResult.attempt``: that counts charged attempts.
        seed: 64 hex characters, the same in each dispatch of the index.
    """

    group_id: str
    index: int
    attempt: int
    seed: str


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Send a shard to a node, in one call. Its items may be of several groups.

    Attributes:
        node_id: The node; it is up and has the slots.
        items: At least one.
    """

    node_id: str
    items: tuple[DispatchItem, ...]


@dataclass(frozen=True, slots=True)
class Cancel:
    """Stop candidates of a group on a node; best effort, answers that still come are dropped.

    Attributes:
        node_id: The node.
        group_id: The group, which has ended or ends in this list of commands.
        items: Pairs of index and attempt, at least one.
    """

    node_id: str
    group_id: str
    items: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class CompleteGroup:
    """Give a group's results to its caller; the group is forgotten.

    Attributes:
        group_id: The group.
        results: Shape (G,), in order; members that are not valid only under ``mask``.
    """

    group_id: str
    results: tuple[GradeResult, ...]


@dataclass(frozen=True, slots=True)
class FailGroup:
    """Raise an error at a group's caller; the group is forgotten.

    Attributes:
        group_id: The group.
        error: ``GroupFailed`` with ``.partial``, or the error of the spec or call as it came.
    """

    group_id: str
    error: Exception


@dataclass(frozen=True, slots=True)
class SetTimer:
    """Send ``TimerFired(timer_id)`` when ``now`` reaches ``at``; a moment that has passed means at once.

    Attributes:
        timer_id: Used once.
        at: Absolute, seconds in the clock of ``now``.
        group_id: The group whose deadline it is, or None. The timer may be forgotten when that group ends.
    """

    timer_id: str
    at: float
    group_id: str | None = None


Command = Dispatch | Cancel | CompleteGroup | FailGroup | SetTimer
