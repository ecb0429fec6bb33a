"""What every reward spec has: what to run and how to judge it. Pure; the kinds are in ``kinds.py``.

A spec makes the request for the in-session program and turns its report into a judgement. Expected values stay on
this side; only ``assert_tests`` sends its test code into the session, to the keeper.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from collimate_ray.errors import SpecError
from collimate_ray.extract import extract_code
from collimate_ray.results import SHOWN_CHARS, CaseResult, Verdict
from collimate_ray.spec.limits import checked_limits
from collimate_ray.spec.report import CaseRecord, Report

#: Verdict of each status of a record; ``ok`` is judged.
VERDICTS = {
    "fail": Verdict.FAILED,
    "exc": Verdict.CRASHED,
    "exit": Verdict.CRASHED,
    "garbled": Verdict.CRASHED,
    "no_entry": Verdict.CRASHED,
    "signal": Verdict.SIGNALED,
    "timeout": Verdict.TIMEOUT,
    "memory": Verdict.MEMORY,
    "output": Verdict.OUTPUT_LIMIT,
}

Scoring = str | Mapping[str, int]


@dataclass(frozen=True)
class Case:
    """One case.

    Attributes:
        give: What the candidate gets: encoded arguments, or a program's input.
        expected: The expected value or output; None where test code judges.
        public: Whether the policy may see it.
        points: Its worth under ``scoring="points"``, above 0.
    """

    give: Any
    expected: Any = None
    public: bool = False
    points: float = 1.0


@dataclass(frozen=True)
class Judgement:
    """What a spec makes of a report: reward in [0, 1], the candidate's verdict, counts and cases."""

    reward: float
    verdict: Verdict
    passed: int
    total: int
    cases: tuple[CaseResult, ...] = ()


@dataclass(frozen=True)
class _Common:
    """Fields that all kinds share, by keyword only."""

    template: str = field(default="python", kw_only=True)
    limits: Mapping[str, float] = field(default_factory=dict, kw_only=True)
    scoring: Scoring = field(default="all", kw_only=True)
    prelude: str = field(default="", kw_only=True)
    isolation: str = field(default="separate", kw_only=True)


class RewardSpec(_Common, ABC):
    """A spec: what to run and how to judge it.

    Attributes:
        template: The session template to run in.
        limits: Limits of a candidate (``spec.limits``), over the defaults.
        scoring: ``all`` (1.0 only if every case passes), ``fraction``, ``points``, or ``{"first_n": N}`` (the fraction
            of the first N cases).
        prelude: Trusted code put before the candidate.
        isolation: ``separate``, or ``shared`` where test code must run in the candidate's own process.
    """

    kind: ClassVar[str]
    #: whether the cases are drawn from the seed
    draws_seed: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for name in ("template", "prelude"):
            if not isinstance(getattr(self, name), str):
                raise SpecError(f"{name}: expected text, found {type(getattr(self, name)).__name__}")
        if not self.template:
            raise SpecError("template: expected a template's name, found ''")
        object.__setattr__(self, "limits", checked_limits(self.limits))
        _check_scoring(self.scoring)
        allowed = ("separate", "shared") if self.kind == "assert_tests" else ("separate",)
        if self.isolation not in allowed:
            raise SpecError(f"isolation: expected {' or '.join(allowed)} for {self.kind}, found {self.isolation!r}")

    @property
    def entry_name(self) -> str:
        """The name that a candidate must define; "" where the kind has none."""
        return getattr(self, "entry", "")

    # what a session is asked -----------------------------------------------------------------------------------

    @abstractmethod
    def cases(self) -> tuple[Case, ...]:
        """Give the cases; () where they are drawn from the seed."""

    def request(self, candidate: str, cases: Sequence[Case]) -> dict[str, Any]:
        """Make the kind's part of the in-session program's request."""
        chosen = self.chosen(cases)
        return {
            "kind": "calls",
            "code": candidate,
            "prelude": self.prelude,
            "entry": self.entry_name,
            "cases": [case.give for case in chosen],
            "stop_early": self.scoring == "all",
            "shared": False,
        }

    def candidate(self, completion: str) -> str:
        """Take the candidate's code out of a completion; "" if there is none."""
        return extract_code(completion, self.entry_name)

    # what its report is worth ----------------------------------------------------------------------------------

    @abstractmethod
    def passes(self, case: Case, record: CaseRecord) -> bool:
        """Judge a case whose record is ``ok``."""

    @abstractmethod
    def shown(self, case: Case, record: CaseRecord) -> tuple[str, str]:
        """Give texts of answer and expectation; they are cut for showing."""

    def judge(self, report: Report, cases: Sequence[Case]) -> Judgement:
        """Judge a report: every case must have been observed passing."""
        chosen = self.chosen(cases)
        records = report.cases if report.load.status == "ok" else (report.load,) * len(chosen)
        results = tuple(
            self._judge_case(i, case, record) for i, (case, record) in enumerate(zip(chosen, records, strict=False))
        )
        passed = sum(result.verdict is Verdict.PASSED for result in results)
        failed = next((result.verdict for result in results if result.verdict is not Verdict.PASSED), None)
        if failed is None and passed < len(chosen):
            failed = Verdict.CRASHED  # cases without a record passed nothing
        reward = self._reward(results, chosen)
        return Judgement(reward, failed or Verdict.PASSED, passed, len(chosen), results)

    def chosen(self, cases: Sequence[Case]) -> Sequence[Case]:
        """Give the cases that count under the scoring."""
        return cases[: self.scoring["first_n"]] if isinstance(self.scoring, Mapping) else cases

    def _judge_case(self, index: int, case: Case, record: CaseRecord) -> CaseResult:
        verdict = VERDICTS.get(record.status, Verdict.CRASHED)
        if record.status == "ok":
            verdict = Verdict.PASSED if self.passes(case, record) else Verdict.FAILED
        got, expected = self.shown(case, record)
        if record.exc:
            got = ": ".join(record.exc[1:])
        return CaseResult(
            index,
            verdict,
            case.points,
            record.cpu_ms,
            record.wall_ms,
            got[:SHOWN_CHARS],
            expected[:SHOWN_CHARS],
            case.public,
        )

    def _reward(self, results: Sequence[CaseResult], chosen: Sequence[Case]) -> float:
        passed = [result for result in results if result.verdict is Verdict.PASSED]
        if self.scoring == "all":
            return 1.0 if chosen and len(passed) == len(chosen) else 0.0
        if self.scoring == "points":
            return sum(result.points for result in passed) / sum(case.points for case in chosen)
        return len(passed) / len(chosen) if chosen else 0.0

    # as JSON ---------------------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Give the spec as JSON-able data that ``spec_from_dict`` takes; scoring is always written."""
        data: dict[str, Any] = {"kind": self.kind}
        for one in fields(self):
            value = getattr(self, one.name)
            if value != one.default or one.name == "scoring":
                data[one.name] = value
        if not self.limits:
            data.pop("limits", None)
        return data

    def spec_hash(self) -> str:
        """Name the spec by its content: 32 hex characters."""
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()[:32]


def _check_scoring(scoring: Any) -> None:
    if isinstance(scoring, str) and scoring in ("all", "fraction", "points"):
        return
    count = scoring.get("first_n") if isinstance(scoring, Mapping) and set(scoring) == {"first_n"} else None
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise SpecError(f'scoring: expected "all", "fraction", "points" or {{"first_n": N}}, found {scoring!r}')
