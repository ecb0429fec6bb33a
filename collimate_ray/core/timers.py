"""The timers that somebody waits for. Must not know the time: a driver fires them."""

from __future__ import annotations

import enum

from collimate_ray.core.commands import SetTimer


class TimerKind(enum.Enum):
    """What a timer is for; the word before the colon of its id."""

    GATHER = "gather"
    DEADLINE = "deadline"
    HOLD = "hold"
    PROBE = "probe"


class Timers:
    """Gives timers their names, which are never used twice, and knows those that still matter."""

    def __init__(self) -> None:
        self._count = 0
        #: timer id -> what it is for and the group or node it is about ("" for gather)
        self.waiting: dict[str, tuple[TimerKind, str]] = {}

    def set(self, kind: TimerKind, subject: str, at: float) -> SetTimer:
        """Make a timer; ``at`` in absolute seconds.

        Returns:
            The command that must reach the driver.
        """
        self._count += 1
        timer_id = f"{kind.value}:{self._count}"
        self.waiting[timer_id] = (kind, subject)
        return SetTimer(timer_id, at, subject if kind is TimerKind.DEADLINE else None)

    def drop(self, timer_id: str | None) -> None:
        """Wait for a timer no more; None and unknown ids are fine."""
        if timer_id is not None:
            self.waiting.pop(timer_id, None)

    def fired(self, timer_id: str) -> tuple[TimerKind, str] | None:
        """Tell what a timer was for, once; None if nobody waits for it."""
        return self.waiting.pop(timer_id, None)
