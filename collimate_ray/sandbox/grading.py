"""One grade through a client: request in, report out, judged here. And the published SDK's Ray-free forms.

Must not schedule: one candidate, one session. What goes wrong is told apart here (design: Verdicts): a report that is
missing while the daemon answers is the session's death (``SessionLost``); a daemon that does not answer is a host's.
"""

from __future__ import annotations

import logging
import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from collimate_ray.errors import CheckerError, InfraError, SessionLost, SpecError
from collimate_ray.results import GradeResult, Verdict, infra_failure
from collimate_ray.sandbox.body import check_argument
from collimate_ray.sandbox.client import SandboxClient
from collimate_ray.sandbox.wire import MAX_TIMEOUT_S, RUNNER_CALL
from collimate_ray.seeds import fresh_seed, is_valid_seed
from collimate_ray.spec import (
    RUNNER_VERSION,
    Case,
    PropertyReward,
    Report,
    ReportMissing,
    RewardSpec,
    as_spec,
    effective_limits,
    read_report,
    runner_code,
)
from collimate_ray.spec.report import CaseRecord
from collimate_ray.values import dumps

logger = logging.getLogger(__name__)

#: Added to an exec's time-out beyond all its cases' guards, s: interpreter start and report on a crowded machine.
_MARGIN_S = 20

#: Memory of keeper and launcher beside the candidate's, MiB: two small interpreters and the largest report.
_KEEPER_MIB = 128

#: Tries of a session that dies: the second death is the candidate's own (design: Verdicts, infra laundering).
SESSION_TRIES = 2


@dataclass(frozen=True)
class Place:
    """Where a grade runs: a client, a template, and a session or none (a fresh one then)."""

    client: SandboxClient
    template: str
    session_id: str | None = None
    exec_id: str | None = None
    deadline: float | None = None


def grade_candidate(
    client: SandboxClient,
    spec: RewardSpec,
    candidate: str,
    *,
    seed: str,
    limits: Mapping[str, float] | None = None,
    template: str | None = None,
    cases: Sequence[Case] | None = None,
    session_id: str | None = None,
    exec_id: str | None = None,
    deadline: float | None = None,
) -> GradeResult:
    """Grade one candidate once.

    Args:
        client: The daemon.
        spec: What to run and how to judge it.
        candidate: Code, taken as it is; blank: verdict NO_CODE.
        seed: 64 hex characters.
        limits: Over the spec's own.
        template: Instead of the spec's own.
        cases: Those of ``prepare_cases``, where they are at hand.
        session_id: A session to run in, or None: a fresh one, discarded.
        exec_id: Names the exec, so that another thread may cancel it.
        deadline: ``time.monotonic()`` seconds after which nobody waits.

    Returns:
        A valid result.

    Raises:
        InfraError: No verdict; ``SessionLost`` where only the session died.
        SpecError: The spec cannot run here; ``CheckerError``: its own code failed.
    """
    place = Place(client, template or spec.template, session_id, exec_id, deadline)
    merged = effective_limits(spec.limits, limits)
    if cases is None:
        cases = prepare_cases(client, spec, seed, limits=limits, template=place.template, deadline=deadline)
    if not candidate.strip():
        return _no_code(spec, cases, seed, place.template)
    report, answer = _run(place, spec.request(candidate, cases), len(spec.chosen(cases)), merged, seed)
    return _result(spec, cases, report, answer, seed, place.template)


def prepare_cases(
    client: SandboxClient,
    spec: RewardSpec,
    seed: str,
    *,
    limits: Mapping[str, float] | None = None,
    template: str | None = None,
    deadline: float | None = None,
) -> tuple[Case, ...]:
    """Give a spec's cases; those of a property are drawn in a session of their own, before any candidate runs.

    Raises:
        InfraError: The session or its host failed.
        CheckerError: Reference or generator failed.
    """
    if not isinstance(spec, PropertyReward):
        return spec.cases()
    place = Place(client, template or spec.template, deadline=deadline)
    report, _ = _run(place, spec.draw_request(seed), 1, effective_limits(spec.limits, limits), seed)
    return spec.drawn(report)


def _run(
    place: Place, asked: dict[str, Any], cases: int, limits: dict[str, float], seed: str
) -> tuple[Report, dict[str, Any]]:
    """Run the in-session program and read its report."""
    nonce = secrets.token_hex(16)
    preloaded = _preloaded(place.client)
    request = dumps(
        {**asked, "nonce": nonce, "limits": limits, "seed": seed, "root_only": _root_only(asked, preloaded)}
    )
    if preloaded:
        body: dict[str, Any] = {"code": RUNNER_CALL, "stdin": request.encode("ascii")}
        if "limits" in place.client.features():
            body["limits"] = _outer_limits(limits)
    else:
        path = f"/tmp/collimate-{nonce[:8]}{secrets.token_hex(8)}.json"
        body = {"code": runner_code(f"main({path!r})"), "files": [{"path": path, "content": request}]}
    answer = _exec(place, {**body, "seed": seed, "timeout_seconds": _timeout(cases, limits)})
    try:
        report = read_report(answer["stdout"], nonce)
    except ReportMissing as missing:
        if answer.get("status") == "memory":  # the daemon ended all its processes together: a limit, no session death
            return Report(CaseRecord("memory")), answer
        raise SessionLost(f"the session ended without a report (exit {answer['exit_code']}: {missing})") from None
    if report.refused:
        raise SpecError(f'{report.refused}; isolation="shared" would allow it, without protection')
    if report.spec_error:
        raise CheckerError(report.spec_error)
    for record in (report.load, *report.cases):
        if record.status == "prelude":  # it ran before the candidate
            raise CheckerError(f"the prelude failed: {' '.join(record.exc).strip()}")
    return report, answer


def _outer_limits(limits: Mapping[str, float]) -> dict[str, float]:
    """Give the exec's own limits: the candidate's, with room for its keeper."""
    outer = {name: limits[name] for name in ("processes", "files", "file_mib")}
    return {**outer, "memory_mib": limits["memory_mib"] + _KEEPER_MIB}


def _preloaded(client: SandboxClient) -> bool:
    """Tell whether the daemon holds this very version of the in-session program."""
    return {"runner", "stdin"} <= client.features() and client.runner_version() == RUNNER_VERSION


def _root_only(asked: Mapping[str, Any], preloaded: bool) -> bool:
    """Tell whether test code may only run where keeper and candidate get different users."""
    return asked["kind"] == "asserts" and not asked["shared"] and not preloaded


def _timeout(cases: int, limits: Mapping[str, float]) -> int:
    """Size the exec's time-out (s) so that the keeper's own guards always ring first."""
    guards = (cases + 1) * limits["wall_time_s"]
    total = limits.get("total_time_s")
    return min(MAX_TIMEOUT_S, math.ceil(guards if total is None else min(guards, total)) + _MARGIN_S)


def _exec(place: Place, body: dict[str, Any]) -> dict[str, Any]:
    if place.exec_id is not None and "cancel" in place.client.features():
        body["exec_id"] = place.exec_id
    if place.session_id is not None:
        return place.client.session_exec(place.session_id, deadline=place.deadline, **body)
    return place.client.exec_once(place.template, deadline=place.deadline, **body)


def _no_code(spec: RewardSpec, cases: Sequence[Case], seed: str, template: str) -> GradeResult:
    total = len(spec.chosen(cases))
    return GradeResult(0.0, verdict=Verdict.NO_CODE, total=total, seed=seed, template=template)


def _result(
    spec: RewardSpec, cases: Sequence[Case], report: Report, answer: Mapping[str, Any], seed: str, template: str
) -> GradeResult:
    judged = spec.judge(report, cases)
    return GradeResult(
        reward=judged.reward,
        verdict=judged.verdict,
        passed=judged.passed,
        total=judged.total,
        cases=judged.cases,
        evidence=dict(report.evidence),
        seed=seed,
        # a daemon that echoes another seed, or none, has not confirmed ours
        seed_ack=str(answer.get("seed_ack", "no-ack")) if str(answer.get("seed")).lower() == seed.lower() else "no-ack",
        template=template,
        isolation="shared" if spec.isolation == "shared" else str(answer.get("isolation", "")),
        exit_code=answer["exit_code"],
        fork_time_ms=float(answer["fork_time_ms"]),
        exec_time_ms=float(answer["exec_time_ms"]),
        cpu_time_ms=sum(case.cpu_time_ms for case in judged.cases),
        max_rss_kib=report.rss_kib,
        raw={name: value for name, value in answer.items() if name != "stdout"},
    )


def session_death(spec: RewardSpec, seed: str, template: str, total: int = 0) -> GradeResult:
    """Make the result of a candidate under which two sessions died."""
    return GradeResult(
        0.0,
        verdict=Verdict.CRASHED,
        total=total,
        seed=seed,
        template=template,
        evidence={"session_death": SESSION_TRIES},
    )


# ---- the SDK's forms ---------------------------------------------------------------------------------------------


def grade(
    client: SandboxClient,
    template_id: str,
    candidate: str,
    spec: RewardSpec | Mapping[str, Any],
    *,
    seed: str | None = None,
    timeout_seconds: float = 30,
    session_id: str | None = None,
) -> GradeResult:
    """Grade one candidate without Ray (the SDK's form).

    Args:
        client: The daemon, as ``connect()`` gives it.
        template_id: The session template.
        candidate: Code, taken as it is; for a model's text call ``extract_code`` first.
        spec: What to run and how to judge it, or its dict.
        seed: 64 hex characters, or None: a fresh one.
        timeout_seconds: Seconds for all cases together, above 0.
        session_id: A session to run in, or None: a fresh one, discarded.

    Raises:
        ConfigError: An argument is wrong.
        InfraError: No verdict.
        SpecError: The spec is wrong or cannot run here.
    """
    spec = as_spec(spec)
    check_argument("candidate", candidate, isinstance(candidate, str), "code as text")
    check_argument("seed", seed, seed is None or is_valid_seed(seed), "64 hex characters or None")
    _check_number("timeout_seconds", timeout_seconds)
    chosen = seed or fresh_seed()
    limits = {"total_time_s": float(timeout_seconds)}
    for _ in range(SESSION_TRIES):
        try:
            return grade_candidate(
                client, spec, candidate, seed=chosen, limits=limits, template=template_id, session_id=session_id
            )
        except SessionLost as error:
            if session_id is not None:  # the caller's own: what it held can't be had in a fresh one
                raise
            logger.info("session death of a candidate: %s", error)
    return session_death(spec, chosen, template_id)


def grade_batch(
    client: SandboxClient,
    template_id: str,
    candidates: Sequence[str],
    spec: RewardSpec | Mapping[str, Any],
    *,
    seeds: Sequence[str | None] | None = None,
    timeout_seconds: float = 30,
    concurrency: int = 24,
    on_infra_error: str = "raise",
) -> list[GradeResult]:
    """Grade many candidates concurrently without Ray (the SDK's form).

    Args:
        client: The daemon, as ``connect()`` gives it.
        template_id: The session template.
        candidates: Code of each, shape (n,); for a model's text call ``extract_code`` first.
        spec: What to run and how to judge it, or its dict.
        seeds: A seed each, shape (n,), or None: fresh ones.
        timeout_seconds: Seconds for all cases of one candidate together, above 0.
        concurrency: Grades at once, at least 1.
        on_infra_error: ``raise`` the first; ``zero``: reward 0.0 and not valid; ``skip``: left out, so the list is
            shorter.

    Returns:
        Results in order, shape (n,) unless skipped.

    Raises:
        ConfigError: An argument is wrong.
        InfraError: A grade has no verdict and ``on_infra_error`` is ``raise``.
    """
    spec = as_spec(spec)
    check_argument("candidates", candidates, not isinstance(candidates, str | bytes), "a list of code")
    check_argument("on_infra_error", on_infra_error, on_infra_error in ("raise", "zero", "skip"), "raise, zero or skip")
    paired = seeds is None or len(seeds) == len(candidates)
    check_argument("seeds", seeds, paired, f"one a candidate ({len(candidates)})")
    _check_number("timeout_seconds", timeout_seconds)
    _check_number("concurrency", concurrency)
    one = _grader_of(client, template_id, spec, timeout_seconds, on_infra_error)
    with ThreadPoolExecutor(concurrency) as pool:
        results = list(pool.map(one, candidates, seeds or [None] * len(candidates)))
    return [result for result in results if result.valid] if on_infra_error == "skip" else results


def _check_number(name: str, value: object) -> None:
    good = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e9
    check_argument(name, value, good, "a number above 0")


def _grader_of(
    client: SandboxClient, template_id: str, spec: RewardSpec, timeout_seconds: float, on_infra_error: str
) -> Callable[[str, str | None], GradeResult]:
    def one(candidate: str, seed: str | None) -> GradeResult:
        try:
            return grade(client, template_id, candidate, spec, seed=seed, timeout_seconds=timeout_seconds)
        except InfraError as error:
            if on_infra_error == "raise":
                raise
            missing = infra_failure(type(error).__name__, seed=seed, template=template_id)
            return replace(missing, reward=0.0, raw={"error": str(error)})

    return one


__all__ = ["grade", "grade_batch", "grade_candidate", "prepare_cases", "session_death"]
