"""Drives the scheduler core: its commands are carried out, answers and timers become its events. Ray-free.

Must not decide where anything runs (core) or know how a node is reached (fleet). Everything here happens on one
event loop. Source: design, Core and API (idempotent groups).
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import random
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from collimate_ray.core import (
    Cancel,
    Command,
    CompleteGroup,
    Dispatch,
    Event,
    FailGroup,
    GroupCancelled,
    GroupSubmitted,
    IndexDone,
    IndexFailed,
    Scheduler,
    SetTimer,
    TimerFired,
)
from collimate_ray.errors import ConfigError, GraderClosed, GroupFailed, InfraError, SpecError
from collimate_ray.messages import JobKey, Outcome, ShardItem, Submission, Terms
from collimate_ray.results import GradeResult, GroupResult

logger = logging.getLogger(__name__)

#: Finished groups that are remembered, so that the same request again gets the same answer.
FINISHED_KEPT = 1000
#: Grade times from which p50 and p99 are told.
TIMES_KEPT = 4096
#: A node gives a candidate up so long after its group's deadline, s: the deadline is the scheduler's to notice, and a
#: node that told of it first would look broken.
GUARD_S = 2.0


class Carrier(Protocol):
    """How work reaches nodes; answers come back by ``Engine.absorb``."""

    def send(
        self,
        node_id: str,
        items: tuple[ShardItem, ...],
        terms: Mapping[str, Terms],
        specs: Mapping[str, Mapping[str, Any]],
    ) -> None:
        """Send a shard to a node; what can't be sent is answered with an error for each item."""

    def cancel(self, node_id: str, keys: tuple[JobKey, ...]) -> None:
        """Stop jobs on a node, best effort."""


@dataclass(eq=False)
class OpenGroup:
    """A group that is being graded."""

    submission: Submission
    spec: Mapping[str, Any]
    #: absolute, monotonic seconds
    deadline: float
    waiters: set[asyncio.Future[GroupResult]] = field(default_factory=set)
    timer: asyncio.TimerHandle | None = None
    #: index -> (attempt, monotonic seconds) of its latest dispatch
    sent: dict[int, tuple[int, float]] = field(default_factory=dict)


class Engine:
    """All groups of a grader.

    Args:
        carrier: How work reaches nodes.
        rng: Randomness of the scheduler; a fresh one by default.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        carrier: Carrier,
        rng: random.Random | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._carrier = carrier
        self._clock = clock
        self.scheduler = Scheduler(rng or random.Random())
        self.closed = False
        #: the latest time that the scheduler saw; it must never run backwards
        self._now = clock()
        #: monotonic seconds of its latest use
        self.touched = clock()
        #: by key
        self._open: dict[str, OpenGroup] = {}
        #: key -> result, oldest first
        self._finished: OrderedDict[str, GroupResult] = OrderedDict()
        self._counts: Counter[str] = Counter()
        self._verdicts: Counter[str] = Counter()
        self._errors: Counter[str] = Counter()
        #: errors of specs by class: nobody's infrastructure was at fault
        self._spec_errors: Counter[str] = Counter()
        #: verdicts by node
        self._done: Counter[str] = Counter()
        self._times: deque[float] = deque(maxlen=TIMES_KEPT)

    @property
    def idle(self) -> bool:
        """Whether no group is open."""
        return not self._open

    def touch(self) -> None:
        """Note that the grader is in use."""
        self.touched = self._clock()

    async def grade(self, submission: Submission, spec: Mapping[str, Any]) -> GroupResult:
        """Grade a group; the same key again joins the open group or gets the finished one's answer.

        Args:
            submission: The group.
            spec: ``to_dict()`` of its spec.

        Raises:
            GroupFailed: It has no result within its deadline, or was cancelled; ``.partial``.
            SpecError: The spec is wrong, or its own code failed.
            GraderClosed: The grader ends.
        """
        if self.closed:
            raise GraderClosed("the grader is shutting down")
        self.touch()
        finished = self._finished.get(submission.key)
        if finished is not None:
            return finished
        waiter: asyncio.Future[GroupResult] = asyncio.get_running_loop().create_future()
        self._join(submission, spec, waiter)
        try:
            return await waiter
        except asyncio.CancelledError:
            self._leave(submission.key, waiter)
            raise

    def feed(self, *events: Event) -> None:
        """Tell the scheduler what happened, and do what it says."""
        self._handle(events, self._clock())

    def absorb(self, node_id: str, outcomes: Iterable[Outcome]) -> None:
        """Take in a node's answers, all at once so that what they free is placed together."""
        self.feed(*(self._event(node_id, outcome) for outcome in outcomes))

    def cancel(self, group_id: str) -> int:
        """Cancel the open groups of a name.

        Returns:
            How many there were.
        """
        keys = [key for key, group in self._open.items() if group.submission.group_id == group_id]
        self.feed(*(GroupCancelled(key) for key in keys))
        return len(keys)

    def close(self) -> None:
        """Stop everything: who waits gets ``GraderClosed``."""
        self.closed = True
        for key in list(self._open):
            self._end(key, GraderClosed("the grader was stopped"))
            self.feed(GroupCancelled(key))

    def stats(self) -> dict[str, Any]:
        """Give the counters; ``grade_ms`` from dispatch to answer, ms; ``done`` and ``running`` by node."""
        times = sorted(self._times)
        seen = self.scheduler.stats()
        return {
            "grades": self._counts["grades"],
            "verdicts": dict(self._verdicts),
            "infra_errors": dict(self._errors),
            "spec_errors": dict(self._spec_errors),
            "reroutes": self._counts["reroutes"],
            "groups": self._counts["groups"],
            "groups_failed": self._counts["groups_failed"],
            "open_groups": len(self._open),
            "queued": seen["queued"],
            "done": dict(self._done),
            "running": {node_id: node["running"] for node_id, node in seen["nodes"].items()},
            "grade_ms": {"p50": _quantile(times, 0.5), "p99": _quantile(times, 0.99)},
        }

    def running(self, node_id: str) -> int:
        """Give how many candidates run on a node."""
        node = self.scheduler.stats()["nodes"].get(node_id)
        return int(node["running"]) if node else 0

    def _join(self, submission: Submission, spec: Mapping[str, Any], waiter: asyncio.Future[GroupResult]) -> None:
        group = self._open.get(submission.key)
        if group is not None:
            group.waiters.add(waiter)
            return
        deadline = self._clock() + submission.deadline_s
        self._open[submission.key] = OpenGroup(submission, spec, deadline, {waiter})
        self.feed(
            GroupSubmitted(submission.key, submission.seeds, deadline, submission.on_infra_error, submission.single)
        )

    def _leave(self, key: str, waiter: asyncio.Future[GroupResult]) -> None:
        group = self._open.get(key)
        if group is None or waiter not in group.waiters:
            return
        group.waiters.discard(waiter)
        if not group.waiters:
            self.feed(GroupCancelled(key))

    def _do(self, command: Command) -> None:
        match command:
            case Dispatch(node_id, _):
                self._dispatch(node_id, command)
            case Cancel(node_id, key, pairs):
                self._carrier.cancel(node_id, tuple((key, index, attempt) for index, attempt in pairs))
            case CompleteGroup(key, results):
                self._complete(key, results)
            case FailGroup(key, error):
                self._end(key, error)
            case SetTimer(timer_id, at, key):
                self._set_timer(timer_id, at, key)

    def _dispatch(self, node_id: str, command: Dispatch) -> None:
        now = self._clock()
        items, terms, specs = [], {}, {}
        for item in command.items:
            group = self._open[item.group_id]
            asked = group.submission
            self._counts["reroutes"] += int(item.index in group.sent)
            group.sent[item.index] = (item.attempt, now)
            key = (item.group_id, item.index, item.attempt)
            items.append(ShardItem(key, asked.completions[item.index], item.seed))
            terms[item.group_id] = Terms(asked.spec.spec_hash, asked.limits, max(0.0, group.deadline - now) + GUARD_S)
            specs[asked.spec.spec_hash] = group.spec
        self._carrier.send(node_id, tuple(items), terms, specs)

    def _event(self, node_id: str, outcome: Outcome) -> IndexDone | IndexFailed:
        key, index, attempt = outcome.key
        self._count(node_id, outcome)
        if outcome.result is not None:
            return IndexDone(key, index, attempt, node_id, outcome.result)
        error = outcome.error or InfraError("an answer without a result", node_id)
        return IndexFailed(key, index, attempt, node_id, error)

    def _count(self, node_id: str, outcome: Outcome) -> None:
        key, index, attempt = outcome.key
        group = self._open.get(key)
        sent_attempt, sent_at = group.sent.get(index, (0, 0.0)) if group else (0, 0.0)
        if sent_attempt != attempt:
            return  # a late answer of a superseded dispatch
        if outcome.result is None:
            at_fault = self._spec_errors if isinstance(outcome.error, SpecError | ConfigError) else self._errors
            at_fault[type(outcome.error).__name__] += 1
            return
        self._counts["grades"] += 1
        self._done[node_id] += 1
        if outcome.result.verdict is not None:
            self._verdicts[outcome.result.verdict.value] += 1
        self._times.append((self._clock() - sent_at) * 1000)

    def _complete(self, key: str, results: Sequence[GradeResult]) -> None:
        group = self._open.get(key)
        if group is None:
            return
        result = GroupResult.of(group.submission.group_id, results)
        if group.submission.named and result.valid.all():
            self._finished[key] = result
            if len(self._finished) > FINISHED_KEPT:
                self._finished.popitem(last=False)
        self._end(key, result)

    def _end(self, key: str, answer: GroupResult | Exception) -> None:
        group = self._open.pop(key, None)
        if group is None:
            return
        self.touch()
        if group.timer is not None:
            group.timer.cancel()
        failed = isinstance(answer, Exception)
        self._counts["groups_failed" if failed else "groups"] += 1
        for waiter in group.waiters:
            if waiter.done():
                continue
            if isinstance(answer, Exception):
                waiter.set_exception(_named(answer, group.submission.group_id))
            else:
                waiter.set_result(answer)

    def _set_timer(self, timer_id: str, at: float, key: str | None) -> None:
        delay = max(0.0, at - self._clock())
        handle = asyncio.get_running_loop().call_later(delay, self._fire, timer_id, at)
        if key is not None and key in self._open:
            self._open[key].timer = handle

    def _fire(self, timer_id: str, at: float) -> None:
        # An event loop may be early by its clock's resolution; the scheduler must not see a time before ``at``.
        self._handle((TimerFired(timer_id),), max(at, self._clock()))

    def _handle(self, events: Iterable[Event], now: float) -> None:
        self._now = max(self._now, now)
        for command in self.scheduler.handle_all(events, self._now):
            self._do(command)


def _named(error: Exception, group_id: str) -> Exception:
    """Tell which group failed, in the caller's words."""
    if not isinstance(error, GroupFailed):
        return error
    partial = error.partial
    if isinstance(partial, GroupResult):
        partial = dataclasses.replace(partial, group_id=group_id)
    text = f"group {group_id}: {error.message}"
    return GroupFailed(text, error.node_id, error.admitted, error.retriable, partial)


def _quantile(ordered: Sequence[float], share: float) -> float | None:
    return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))], 3) if ordered else None
