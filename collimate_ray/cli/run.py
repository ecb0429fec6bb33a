"""Grades rows on a cluster, each group's line written as it finishes. The loop of ``grade`` and of ``demo``.

Must not judge and must not print tables. A group that can't be graded at all (its spec's own code fails)
gets its line too, without verdicts: a file of results is never shorter than the file of groups, unless the
run was stopped.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Sequence
from typing import Any

from collimate_ray.cli import signals
from collimate_ray.cli.errors import NoCluster
from collimate_ray.cli.inputs import Row, shown
from collimate_ray.cli.output import OutFile, group_record
from collimate_ray.cli.progress import Progress, note, progress
from collimate_ray.cli.report import Tally
from collimate_ray.cli.session import CONTROL_S, Options, first_line, running_grader
from collimate_ray.errors import (
    CollimateRayError,
    ConfigError,
    GraderClosed,
    GroupFailed,
    InfraError,
    SpecError,
)
from collimate_ray.results import GroupResult, infra_failure
from collimate_ray.seeds import DET_SEED, seed_from_key

#: Completions in flight for each slot: enough that no slot waits for the driver, few enough that none waits
#: in a queue for as long as its deadline.
_IN_FLIGHT_PER_SLOT = 8
_IN_FLIGHT_LEAST = 64
_log = logging.getLogger(__name__)


def grade_rows(rows: Sequence[Row], out: OutFile, options: Options) -> Tally:
    """Grade all rows and write a line each.

    Raises:
        NoCluster: There is no cluster, or it or the grader went away.
        ConfigError: The grader refuses an option.
        OutputLost: OUT can't be written any more.
    """
    from collimate_ray.cli.cluster import joined_cluster, local_cluster

    cluster = joined_cluster(options.address) if options.address else local_cluster(options.nodes)
    with cluster, running_grader(options) as handle:
        out.begin()
        tally = Tally()
        began = time.monotonic()
        with progress(sum(len(row.completions) for row in rows), options.bar) as display:
            _Loop(handle, options, out, tally, display).run(rows)
        tally.seconds = time.monotonic() - began
        return tally


class _Loop:
    """Keeps a window of groups submitted and takes them as they come back."""

    def __init__(self, handle: Any, options: Options, out: OutFile, tally: Tally, display: Progress) -> None:
        self.handle = handle
        self.options = options
        self.out = out
        self.tally = tally
        self.display = display
        #: group ids must be this run's own: a grader answers a known id from its record
        self.run_id = secrets.token_hex(4)
        #: submitted and not back yet: ref -> row
        self.open: dict[Any, Row] = {}

    def run(self, rows: Sequence[Row]) -> None:
        """Grade all rows; whatever ends this early cancels what is still open."""
        import ray

        try:
            window = self._window()
            waiting = list(reversed(rows))
            while waiting or self.open:
                while waiting and self._room(len(waiting[-1].completions), window):
                    self._submit(waiting.pop())
                for ref in ray.wait(list(self.open), timeout=1.0)[0]:
                    self._finish(ref)
                self.display.update(self.tally.grades)
                signals.checkpoint()
        except (ray.exceptions.RayError, GraderClosed) as error:
            raise NoCluster(f"the grader went away: {first_line(error)}") from error
        finally:
            with signals.undisturbed():
                self._cancel_open()

    def _room(self, size: int, window: int) -> bool:
        flying = sum(len(row.completions) for row in self.open.values())
        return not self.open or flying + size <= window

    def _window(self) -> int:
        import ray

        stats = ray.get(self.handle.stats.remote(), timeout=CONTROL_S)
        slots = sum(int(node["slots"]) for node in stats["nodes"].values())
        return max(_IN_FLIGHT_LEAST, _IN_FLIGHT_PER_SLOT * slots)

    def _submit(self, row: Row) -> None:
        ref = self.handle.grade_group.remote(
            list(row.completions),
            row.spec,
            seeds=_seeds(row, self.options.seeds),
            group_id=self._group_id(row),
            limits=row.limits,
            deadline_s=self.options.deadline_s,
            on_infra_error="mask",
        )
        self.open[ref] = row

    def _group_id(self, row: Row) -> str:
        return f"{self.run_id}/{row.id}"

    def _finish(self, ref: Any) -> None:
        row = self.open[ref]
        group = _result(ref, row)
        self.out.write(group_record(row.id, group))
        self.tally.add(group.results)
        del self.open[ref]

    def _cancel_open(self) -> None:
        import ray

        try:
            refs = [self.handle.cancel.remote(self._group_id(row)) for row in self.open.values()]
            ray.wait(refs, num_returns=len(refs), timeout=CONTROL_S) if refs else None
        except (CollimateRayError, ray.exceptions.RayError) as error:
            _log.warning("cannot cancel %d open groups: %s", len(self.open), first_line(error))


def _seeds(row: Row, mode: str) -> list[str] | str:
    if row.seed is None and mode == "vanilla":
        return mode
    shared = row.seed or (DET_SEED if mode == "deterministic" else seed_from_key(row.id))
    return [shared] * len(row.completions)


def note_errors(row_id: str, group: GroupResult) -> None:
    """Say which members of a group have no verdict, and why; nothing where all have one."""
    errors = [result.error or "unknown" for result in group.results if not result.valid]
    if errors:
        names = ", ".join(sorted(set(errors)))
        note(f"{shown(row_id)}: no verdict for {len(errors)} of {len(group.results)}: {names}")


def _result(ref: Any, row: Row) -> GroupResult:
    """Get a group's result; one that failed as a whole comes back without verdicts, whole and in order."""
    import ray

    try:
        group = ray.get(ref)
    except (SpecError, ConfigError, InfraError) as error:
        # Ray raises a class made of its own and ours; the original is its cause
        cause = getattr(error, "cause", error)
        note(f"{shown(row.id)}: no verdict: {type(cause).__name__}: {first_line(cause)}")
        if isinstance(cause, GroupFailed) and isinstance(cause.partial, GroupResult):
            return cause.partial
        return GroupResult.of(row.id, [infra_failure(type(cause).__name__)] * len(row.completions))
    if not isinstance(group, GroupResult) or len(group.results) != len(row.completions):
        raise GraderClosed(f"the answer to group {row.id} is not that group")
    note_errors(row.id, group)
    return group
