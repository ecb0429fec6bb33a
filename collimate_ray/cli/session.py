"""The grader of a command: the joined cluster's own, or one for the time of the run. Must not grade.

Whoever starts a grader ends it, also where its start is broken off; one that was there before is left
alone, and so is one that others have come to use meanwhile. Sources: design API (start, get, stop).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from collimate_ray.cli import signals
from collimate_ray.cli.errors import NoCluster
from collimate_ray.cli.progress import note
from collimate_ray.errors import CollimateRayError, ConfigError, GraderClosed, SpecError

#: Seconds for a control call to the grader.
CONTROL_S = 10.0
#: Characters of an error's text that are shown.
_SHOWN_CHARS = 300


@dataclass(frozen=True)
class Options:
    """How to grade.

    Attributes:
        nodes: Raylets of the local cluster, head included; unused with ``address``.
        address: A running cluster to join, or None.
        slots: Grades at once on one node, or None for the default.
        deadline_s: Seconds that a group may take from its submission.
        seeds: ``vanilla``, ``crn`` or ``deterministic``; a row's own seed wins.
        template: Template that the nodes prepare.
        daemon: Which daemon grades on each node, as ``start()`` takes it.
        bar: Draw a progress bar where there is a terminal.
    """

    nodes: int = 1
    address: str | None = None
    slots: int | None = None
    deadline_s: float = 600.0
    seeds: str = "crn"
    template: str = "python"
    daemon: str = "auto"
    bar: bool = True


@contextmanager
def running_grader(options: Options) -> Iterator[Any]:
    """Use the grader of the joined cluster, or start one and end it, also where its start is broken off."""
    found = _find_grader() if options.address else None
    try:
        yield found or _start_grader(options)
    finally:
        with signals.undisturbed():
            if found is None:
                _stop_grader(shared=options.address is not None)


def _find_grader() -> Any | None:
    from collimate_ray.grader import get

    try:
        return get(timeout_s=CONTROL_S)
    except GraderClosed:
        return None


def _start_grader(options: Options) -> Any:
    from collimate_ray.grader import start

    try:
        handle = start(slots=options.slots, template=options.template, daemon=options.daemon)
    except (ConfigError, SpecError):
        raise
    except CollimateRayError as error:
        raise NoCluster(f"the grader does not start: {first_line(error)}") from error
    signals.arm()
    signals.checkpoint()
    return handle


def _stop_grader(shared: bool) -> None:
    import ray

    from collimate_ray.grader import stop

    try:
        if shared and _others_use_it():
            note("others use the grader by now: it is left running, and ends by itself when idle")
            return
        stop()
    except (CollimateRayError, ray.exceptions.RayError) as error:
        note(f"the grader did not stop in order: {first_line(error)}")


def _others_use_it() -> bool:
    import ray

    handle = _find_grader()
    return handle is not None and bool(ray.get(handle.stats.remote(), timeout=CONTROL_S)["open_groups"])


def first_line(error: BaseException) -> str:
    """Give an error's text in short; of Ray's wrappers that of what they wrap."""
    lines = str(getattr(error, "cause", None) or error).strip().splitlines() or [type(error).__name__]
    return lines[0][:_SHOWN_CHARS]
