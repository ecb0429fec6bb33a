"""What a grade came to: verdicts, results of a candidate and of a group. Frozen and picklable; what crosses Ray.

Must not judge anything: rewards are made by the spec. Shapes are those of design API (GradeResult, GroupResult).
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

#: Texts shown of a case's answer and expectation are cut here, in characters.
SHOWN_CHARS = 200


class Verdict(str, enum.Enum):
    """What happened to the candidate. An infra error has none."""

    PASSED = "passed"
    FAILED = "failed"
    CRASHED = "crashed"
    SIGNALED = "signaled"
    TIMEOUT = "timeout"
    MEMORY = "memory"
    OUTPUT_LIMIT = "output_limit"
    NO_CODE = "no_code"


@dataclass(frozen=True)
class CaseResult:
    """One case of a candidate.

    Attributes:
        index: Place of the case in the spec, from 0.
        verdict: What happened in this case.
        points: What the case is worth, earned or not.
        cpu_time_ms: CPU time of the case, ms.
        wall_time_ms: Wall time of the case, ms.
        got: The candidate's answer, cut at 200 characters.
        expected: The expected answer, cut at 200 characters.
        public: Whether the case may be shown to the policy.
    """

    index: int
    verdict: Verdict
    points: float = 1.0
    cpu_time_ms: float = 0.0
    wall_time_ms: float = 0.0
    got: str = ""
    expected: str = ""
    public: bool = False


@dataclass(frozen=True)
class GradeResult:
    """The grade of one candidate.

    Attributes:
        reward: In [0, 1], never NaN; None where there is no verdict (0.0 under ``on_infra_error="zero"``).
        valid: True if there is a verdict; a reward that is not valid must not be trained on.
        verdict: What happened to the candidate: that of its first case that did not pass; None without a verdict.
        passed: Cases that passed.
        total: Cases of the spec.
        cases: Detail of each case, shape (total,) or shorter where grading stopped early.
        evidence: Counters of attempts to forge, by kind.
        error: Name of the InfraError class, or None.
        seed: 64 hex characters, the seed that was used.
        seed_ack: What the daemon says of the seed: ``verified``, ``off`` or ``no-ack``.
        template: The session's template.
        node_id: The node that graded it ("" without Ray).
        isolation: The isolation that was in force, as the daemon names it; ``shared`` where the spec asked for it.
        attempt: Dispatches that were charged before this one, from 0.
        dedup_of: Index of the identical member that was graded instead, or None.
        exit_code: Exit status of the exec, or None.
        queue_time_ms: Time from being queued to the dispatch that gave this result, ms.
        fork_time_ms: Time to get a session, ms.
        exec_time_ms: Time of the exec, ms.
        cpu_time_ms: CPU time of the candidate, ms.
        max_rss_kib: Peak resident memory of the candidate's largest process, KiB.
        raw: The wire's answer (the SDK's forms only).
    """

    reward: float | None
    valid: bool = True
    verdict: Verdict | None = None
    passed: int = 0
    total: int = 0
    cases: tuple[CaseResult, ...] = ()
    evidence: Mapping[str, int] = field(default_factory=dict)
    error: str | None = None
    seed: str | None = None
    seed_ack: str | None = None
    template: str = ""
    node_id: str = ""
    isolation: str = ""
    attempt: int = 0
    dedup_of: int | None = None
    exit_code: int | None = None
    queue_time_ms: float = 0.0
    fork_time_ms: float = 0.0
    exec_time_ms: float = 0.0
    cpu_time_ms: float = 0.0
    max_rss_kib: int = 0
    raw: Mapping[str, Any] = field(default_factory=dict)

    @property
    def infra_error(self) -> bool:
        """True if no verdict was produced (``not valid``)."""
        return not self.valid

    def feedback(self) -> dict[str, Any]:
        """Give what may be shown to the policy: verdict, counts, and details of public cases only.

        Returns:
            ``{"verdict", "passed", "total", "cases": [...]}``, JSON-able.
        """
        return {
            "verdict": self.verdict.value if self.verdict else None,
            "passed": self.passed,
            "total": self.total,
            "cases": [_case_feedback(case) for case in self.cases],
        }

    def to_dict(self) -> dict[str, Any]:
        """Give all fields but ``raw``, JSON-able, in order."""
        data = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "raw"}
        data["verdict"] = self.verdict.value if self.verdict else None
        data["cases"] = [_case_dict(case) for case in self.cases]
        data["evidence"] = dict(self.evidence)
        return data


def _case_dict(case: CaseResult) -> dict[str, Any]:
    data = {name: getattr(case, name) for name in case.__dataclass_fields__}
    data["verdict"] = case.verdict.value
    return data


def _case_feedback(case: CaseResult) -> dict[str, Any]:
    shown = {"index": case.index, "verdict": case.verdict.value}
    if case.public:
        shown.update(got=case.got, expected=case.expected)
    else:
        shown.update(got="", expected="")
    return shown


@dataclass(frozen=True, eq=False)
class GroupResult:
    """The grades of a group, whole and in the order of its completions.

    Attributes:
        group_id: The group's name.
        rewards: float32, shape (G,), each in [0, 1]; 0.0 where not valid.
        valid: bool, shape (G,).
        results: Shape (G,).
    """

    group_id: str
    rewards: npt.NDArray[np.float32]
    valid: npt.NDArray[np.bool_]
    results: tuple[GradeResult, ...]

    @classmethod
    def of(cls, group_id: str, results: Sequence[GradeResult]) -> GroupResult:
        """Make a group's result from its members' results, shape (G,)."""
        rewards = np.array([r.reward if r.valid and r.reward is not None else 0.0 for r in results], np.float32)
        return cls(group_id, rewards, np.array([r.valid for r in results], np.bool_), tuple(results))

    def advantages(self, scale: bool = True, eps: float = 1e-6) -> npt.NDArray[np.float32]:
        """Group-relative advantages over the valid members (GRPO, arXiv 2402.03300).

        Args:
            scale: Divide by the standard deviation (ddof 1) plus ``eps``.
            eps: Added to the standard deviation.

        Returns:
            float32, shape (G,); 0.0 for members that are not valid, and for all when fewer than two are.
        """
        out = np.zeros(len(self.rewards), np.float32)
        kept = self.rewards[self.valid].astype(np.float64)
        if len(kept) < 2:
            return out
        centred = kept - kept.mean()
        out[self.valid] = centred / (kept.std(ddof=1) + eps) if scale else centred
        return out


def infra_failure(error: str, **known: Any) -> GradeResult:
    """Make the result of a member that has no verdict.

    Args:
        error: Name of the InfraError class.
        **known: Other fields of ``GradeResult`` that are known, such as ``seed``.
    """
    return GradeResult(reward=None, valid=False, error=error, **known)
