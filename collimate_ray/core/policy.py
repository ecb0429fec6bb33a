"""The numbers that the scheduler goes by, in one place. Must not hold state. Source: design, Core and Verdicts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Policy:
    """How the scheduler decides.

    Attributes:
        gather_s: Longest wait of a single submission for company, seconds.
        min_shard: A shard is not split below this many candidates: a call costs about as much as grading four
            trivial ones (notes, RAY: 12,300 rollouts/s in shards against 1,900 with a call each).
        hold_s: First pause of a node that refused work for want of room, seconds.
        hold_max_s: Longest such pause, seconds; pauses double up to it.
        probe_s: Time after which a suspect node gets one candidate to show that it works, seconds.
        session_deaths: Session deaths of an index that make the verdict CRASHED.
        host_deaths: Host deaths of an index after which it is not dispatched again.
    """

    gather_s: float = 0.005
    min_shard: int = 4
    hold_s: float = 0.1
    hold_max_s: float = 2.0
    probe_s: float = 1.0
    session_deaths: int = 2
    host_deaths: int = 3
