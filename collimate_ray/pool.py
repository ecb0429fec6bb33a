"""The slots of one node: threads that grade candidates through its daemon. Ray-free.

Must not place work (core does) or judge it (sandbox.grading does). A job ends in exactly one ``Outcome``, or in none
when it was cancelled. Source: design, Ray ("blocking HTTP in an executor sized to the pool") and Verdicts.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

from collimate_ray.errors import CheckerError, CollimateRayError, InfraError, SessionLost
from collimate_ray.messages import JobKey, Outcome
from collimate_ray.results import GradeResult
from collimate_ray.sandbox.client import SandboxClient
from collimate_ray.sandbox.grading import SESSION_TRIES, grade_candidate, prepare_cases
from collimate_ray.spec import Case, RewardSpec

logger = logging.getLogger(__name__)

#: Case lists kept, one a (spec, seed). A trainer's step has a few hundred groups; older ones are not asked again.
CASES_KEPT = 256


#: Longest time that a cancellation runs after its exec, s, and pause between its tries, s.
CANCEL_S, CANCEL_LOOK_S = 10.0, 0.05


@dataclass(frozen=True)
class Job:
    """One candidate to grade.

    Attributes:
        key: Group key, index and attempt.
        completion: Model text.
        spec: How to judge it.
        seed: 64 hex characters.
        template: The session's template.
        limits: Limits of the call, over those of the spec.
        deadline: Absolute, seconds of ``time.monotonic()``.
    """

    key: JobKey
    completion: str
    spec: RewardSpec
    seed: str
    template: str
    limits: Mapping[str, float] = field(default_factory=dict)
    deadline: float | None = None


class CaseCache:
    """Cases of ``property`` specs, made once for each (spec, seed) and shared by a node's candidates.

    Args:
        client: The node's daemon.
    """

    def __init__(self, client: SandboxClient) -> None:
        self._client = client
        self._lock = threading.Lock()
        #: (spec hash, seed) -> its lock and, once made, the one-element list of its cases; least recent first
        self._entries: OrderedDict[tuple[str, str], tuple[threading.Lock, list[Sequence[Case]]]] = OrderedDict()

    def get(self, job: Job) -> Sequence[Case]:
        """Give a job's cases; the first caller makes them, others of the same key wait. Failures are not kept.

        Raises:
            InfraError: They could not be made.
            CheckerError: The spec's reference or generator failed.
        """
        lock, made = self._entry((job.spec.spec_hash(), job.seed))
        with lock:
            if not made:
                made.append(self._make(job))
            return made[0]

    def _make(self, job: Job) -> Sequence[Case]:
        """No candidate is in the session that makes cases: its death must not be charged to one."""
        for _ in range(SESSION_TRIES):
            try:
                return prepare_cases(
                    self._client,
                    job.spec,
                    job.seed,
                    limits=job.limits,
                    template=job.template,
                    deadline=job.deadline,
                )
            except SessionLost as error:
                lost = error
        raise CheckerError(f"the spec's own code: its session died {SESSION_TRIES} times: {lost.message}")

    def _entry(self, key: tuple[str, str]) -> tuple[threading.Lock, list[Sequence[Case]]]:
        with self._lock:
            entry = self._entries.setdefault(key, (threading.Lock(), []))
            self._entries.move_to_end(key)
            if len(self._entries) > CASES_KEPT:
                self._entries.popitem(last=False)
            return entry


class SlotPool:
    """Grades jobs in threads.

    Args:
        client: The node's daemon.
        threads: Jobs that run at once, at least 1.
        can_cancel: The daemon has the feature ``cancel``.
    """

    def __init__(self, client: SandboxClient, threads: int, *, can_cancel: bool = False) -> None:
        self._client = client
        self._can_cancel = can_cancel
        self._cases = CaseCache(client)
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="grade")
        self._lock = threading.Lock()
        #: key -> exec id and future of each job that has neither ended nor been cancelled
        self._open: dict[JobKey, tuple[str, Future[GradeResult | None]]] = {}

    @property
    def running(self) -> int:
        """Jobs that have neither ended nor been cancelled."""
        return len(self._open)

    def submit(self, job: Job, done: Callable[[Outcome], None]) -> None:
        """Start a job; a key that is open already is ignored (the call was sent twice).

        Args:
            job: The job.
            done: Called with its outcome from the job's thread; never for a cancelled job.
        """
        exec_id = uuid.uuid4().hex
        with self._lock:
            if job.key in self._open:
                return
            future = self._executor.submit(self._grade, job, exec_id)
            self._open[job.key] = (exec_id, future)
        future.add_done_callback(lambda ended: self._end(job.key, exec_id, ended, done))

    def cancel(self, keys: Iterable[JobKey]) -> None:
        """Stop jobs and forget their outcomes. Blocks for the daemon's answers; unknown keys are ignored."""
        with self._lock:
            found = [job for key in keys if (job := self._open.pop(key, None))]
        left = [(exec_id, future) for exec_id, future in found if not future.cancel()]
        end = time.monotonic() + CANCEL_S
        while self._can_cancel and left and time.monotonic() < end:
            # one that is about to be sent is not known to the daemon yet: asked again until it is, or has ended
            left = [(exec_id, future) for exec_id, future in left if not (future.done() or self._stop(exec_id))]
            wait([future for _, future in left], timeout=CANCEL_LOOK_S)

    def _stop(self, exec_id: str) -> bool:
        """Stop an exec; False if the daemon does not know it."""
        try:
            return self._client.cancel_exec(exec_id)
        except CollimateRayError as error:
            logger.debug("exec %s not cancelled: %s", exec_id, error)
            return True

    def cancel_all(self) -> None:
        """Stop every job. Blocks for the daemon's answers."""
        self.cancel(list(self._open))

    def close(self) -> None:
        """Cancel everything and let the threads end; blocks for the daemon's answers, not for the threads."""
        self.cancel_all()
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _grade(self, job: Job, exec_id: str) -> GradeResult | None:
        with self._lock:  # ``submit`` holds it until the job is noted
            if not self._is_open(job.key, exec_id):
                return None  # cancelled before it began
        cases = self._cases.get(job) if job.spec.draws_seed else None
        return grade_candidate(
            self._client,
            job.spec,
            job.spec.candidate(job.completion),
            seed=job.seed,
            limits=job.limits,
            template=job.template,
            cases=cases,
            exec_id=exec_id,
            deadline=job.deadline,
        )

    def _end(
        self, key: JobKey, exec_id: str, ended: Future[GradeResult | None], done: Callable[[Outcome], None]
    ) -> None:
        with self._lock:
            if not self._is_open(key, exec_id):
                return
            del self._open[key]
        error = ended.exception()
        done(Outcome(key, error=classify(error)) if error else Outcome(key, result=ended.result()))

    def _is_open(self, key: JobKey, exec_id: str) -> bool:
        return key in self._open and self._open[key][0] == exec_id


def classify(error: BaseException) -> Exception:
    """Give the errors.py form of what a grade raised: our own as they are, anything else is a fault of ours.

    Args:
        error: What was raised.
    """
    if isinstance(error, CollimateRayError):
        return error
    logger.error("grading failed by a fault of this package", exc_info=error)
    return InfraError(f"grading failed: {type(error).__name__}: {str(error)[:200]}", None, True, False)
