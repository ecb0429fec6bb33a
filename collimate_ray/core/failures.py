"""What an error of a dispatched index means for the index. Must not act on it; see ``scheduler.py``.

Source: design, Verdicts (infra laundering) and Failure classes.
"""

from __future__ import annotations

import enum

from collimate_ray.errors import InfraError, SandboxAtCapacity, SandboxDraining, SessionLost


class Fate(enum.Enum):
    """What becomes of an index that came back without a verdict."""

    #: refused by a node that drains: elsewhere, nothing charged
    ELSEWHERE = "draining"
    #: refused by a node without room: again, nothing charged
    LATER = "at capacity"
    #: its session broke while its daemon answers: once more on another, then CRASHED
    SESSION_DEATH = "session death"
    #: daemon, actor, node or link broke: elsewhere, never a verdict
    HOST_DEATH = "host death"
    #: no verdict, and trying again is no use
    FINAL = "final"
    #: the call or the spec is wrong: the group fails
    WRONG = "wrong"


def fate_of(error: Exception) -> Fate:
    """Classify an error by its class; an ``InfraError`` of another class than the named ones is a host death."""
    if not isinstance(error, InfraError):
        return Fate.WRONG
    if not error.retriable:
        return Fate.FINAL
    if isinstance(error, SandboxDraining):
        return Fate.ELSEWHERE
    if isinstance(error, SandboxAtCapacity):
        return Fate.LATER
    return Fate.SESSION_DEATH if isinstance(error, SessionLost) else Fate.HOST_DEATH
