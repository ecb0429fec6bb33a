"""The sans-IO scheduler: events in, commands out.

Must not touch Ray, sockets, clocks, threads or global randomness. Source: design, Core; the form is h11's. A
driver calls ``Scheduler.handle(event, now)`` and obeys what comes back.
"""

from collimate_ray.core.commands import (
    Cancel,
    Command,
    CompleteGroup,
    Dispatch,
    DispatchItem,
    FailGroup,
    SetTimer,
)
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
    OnInfraError,
    TimerFired,
)
from collimate_ray.core.invariants import InvariantViolated
from collimate_ray.core.policy import Policy
from collimate_ray.core.scheduler import Scheduler

__all__ = [
    "Cancel",
    "Command",
    "CompleteGroup",
    "Dispatch",
    "DispatchItem",
    "Event",
    "FailGroup",
    "GroupCancelled",
    "GroupSubmitted",
    "IndexDone",
    "IndexFailed",
    "InvariantViolated",
    "NodeDraining",
    "NodeLost",
    "NodeReport",
    "NodeUndrained",
    "NodeUp",
    "OnInfraError",
    "Policy",
    "Scheduler",
    "SetTimer",
    "TimerFired",
]
