"""What a run came to: counted as results come, shown as tables for people or one JSON object for programs.

Must not show anything of a spec or of a completion. Times are those that the nodes measured (fork and exec
of a grade); the rate is grades by wall time from the first submission to the last result, start-up
excluded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from collimate_ray.errors import CheckerError, ConfigError, SpecError
from collimate_ray.results import GradeResult, Verdict

#: Characters of a node id that are shown: Ray's own tools show as many, and they name the daemon's directory.
NODE_CHARS = 12
#: Names of errors that are the caller's own, not the machines': the spec or its code, or an option of the group.
_SPEC_ERRORS = frozenset(kind.__name__ for kind in (CheckerError, ConfigError, SpecError))


@dataclass
class NodeTally:
    """What one node did.

    Attributes:
        grades: Grades with a verdict.
        passed: Those with verdict PASSED.
        times_ms: Time of each, ms.
    """

    grades: int = 0
    passed: int = 0
    times_ms: list[float] = field(default_factory=list)


@dataclass
class Tally:
    """Counts of a run, filled by ``add``.

    Attributes:
        groups: Groups that came back.
        grades: Completions in them, with a verdict or without.
        verdicts: Grades by verdict.
        infra_errors: Grades without a verdict because of the machines, by the error's name.
        spec_errors: Grades without a verdict because the spec or its own code is wrong, by the error's name.
        evidence: Attempts to forge, by kind.
        nodes: By node id.
        reward_sum: Sum of the valid rewards.
        seconds: Wall time of the grading, s.
    """

    groups: int = 0
    grades: int = 0
    verdicts: Counter[str] = field(default_factory=Counter)
    infra_errors: Counter[str] = field(default_factory=Counter)
    spec_errors: Counter[str] = field(default_factory=Counter)
    evidence: Counter[str] = field(default_factory=Counter)
    nodes: dict[str, NodeTally] = field(default_factory=dict)
    reward_sum: float = 0.0
    seconds: float = 0.0

    def add(self, results: Iterable[GradeResult]) -> None:
        """Count one group's results."""
        self.groups += 1
        for result in results:
            self.grades += 1
            self.evidence.update(result.evidence)
            if result.valid and result.verdict is not None:
                self._add_verdict(result, result.verdict)
            else:
                self._add_error(result.error or "unknown")

    def _add_error(self, name: str) -> None:
        errors = self.spec_errors if name in _SPEC_ERRORS else self.infra_errors
        errors[name] += 1

    def _add_verdict(self, result: GradeResult, verdict: Verdict) -> None:
        self.verdicts[verdict.value] += 1
        self.reward_sum += result.reward or 0.0
        node = self.nodes.setdefault(result.node_id, NodeTally())
        node.grades += 1
        node.passed += verdict is Verdict.PASSED
        node.times_ms.append(result.fork_time_ms + result.exec_time_ms)

    @property
    def without_verdict(self) -> int:
        """Grades that have no verdict."""
        return (self.infra_errors + self.spec_errors).total()

    @property
    def rate(self) -> float:
        """Grades per second."""
        return self.grades / self.seconds if self.seconds > 0 else 0.0

    def summary(self) -> dict[str, Any]:
        """Give everything, JSON-able."""
        times = [ms for node in self.nodes.values() for ms in node.times_ms]
        judged = self.grades - self.without_verdict
        return {
            "groups": self.groups,
            "grades": self.grades,
            "verdicts": dict(self.verdicts),
            "infra_errors": dict(self.infra_errors),
            "spec_errors": dict(self.spec_errors),
            "evidence": dict(self.evidence),
            "reward_mean": self.reward_sum / judged if judged else None,
            "nodes": {name: _node_summary(node) for name, node in sorted(self.nodes.items())},
            "seconds": round(self.seconds, 3),
            "grades_per_s": round(self.rate, 2),
            "p50_ms": percentile(times, 0.50),
            "p99_ms": percentile(times, 0.99),
        }


def _node_summary(node: NodeTally) -> dict[str, Any]:
    p50, p99 = percentile(node.times_ms, 0.50), percentile(node.times_ms, 0.99)
    return {"grades": node.grades, "passed": node.passed, "p50_ms": p50, "p99_ms": p99}


def percentile(values: list[float], q: float) -> float | None:
    """Give the q-quantile (nearest rank, q in [0, 1]) to 0.1, or None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    return round(ordered[min(len(ordered) - 1, int(q * len(ordered)))], 1)


def render(tally: Tally, out: str) -> str:
    """Draw the tables: per verdict, per node, and the closing lines.

    Args:
        tally: What was counted.
        out: Path of the results.

    Returns:
        Text of several lines, with colours where standard output is a terminal.
    """
    from rich.console import Console

    console = Console(highlight=False)
    with console.capture() as captured:
        console.print(_verdict_table(tally))
        console.print(_node_table(tally))
        for line in _closing_lines(tally, out):
            console.print(line, markup=False, soft_wrap=True)
    return captured.get().rstrip("\n")


def _verdict_table(tally: Tally) -> Any:
    table = _table("verdict", "grades", "share")
    for verdict in Verdict:
        if count := tally.verdicts[verdict.value]:
            table.add_row(verdict.name, str(count), f"{count / tally.grades:.1%}")
    for name, count in sorted((tally.infra_errors + tally.spec_errors).items()):
        table.add_row(f"no verdict: {name}", str(count), f"{count / tally.grades:.1%}")
    return table


def _node_table(tally: Tally) -> Any:
    table = _table("node", "grades", "passed", "p50 ms", "p99 ms")
    for name, node in sorted(tally.nodes.items()):
        p50, p99 = percentile(node.times_ms, 0.50), percentile(node.times_ms, 0.99)
        table.add_row(name[:NODE_CHARS] or "-", str(node.grades), str(node.passed), str(p50), str(p99))
    return table


def _table(first: str, *others: str) -> Any:
    from rich.table import Table

    table = Table(first)
    for name in others:
        table.add_column(name, justify="right")
    return table


def _closing_lines(tally: Tally, out: str) -> list[str]:
    whole = tally.summary()
    p50, p99 = whole["p50_ms"] or 0.0, whole["p99_ms"] or 0.0
    lines = [
        f"{tally.groups} groups, {tally.grades} grades in {tally.seconds:.1f} s: {tally.rate:.1f} grades/s, "
        f"a grade takes p50 {p50:.0f} ms, p99 {p99:.0f} ms",
        f"infra errors: {tally.infra_errors.total()}",
        f"spec errors: {tally.spec_errors.total()}",
    ]
    if tally.evidence:
        kinds = ", ".join(f"{name} {count}" for name, count in sorted(tally.evidence.items()))
        lines.append(f"attempts to forge a verdict, none of which counted: {kinds}")
    return [*lines, f"results: {out}"]
