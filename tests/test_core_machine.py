"""The scheduler under random histories: no order of events loses, doubles or strands an index."""

import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from collimate_ray.core import (
    Cancel,
    CompleteGroup,
    Dispatch,
    FailGroup,
    GroupCancelled,
    GroupSubmitted,
    IndexDone,
    IndexFailed,
    NodeDraining,
    NodeLost,
    NodeReport,
    NodeUndrained,
    NodeUp,
    Scheduler,
    SetTimer,
    TimerFired,
)
from collimate_ray.errors import (
    CheckerError,
    GroupFailed,
    InfraError,
    SandboxAtCapacity,
    SandboxDraining,
    SandboxUnavailable,
    SessionLost,
    WireError,
)
from collimate_ray.results import GradeResult, Verdict

NODES = st.sampled_from(["a", "b", "c", "d"])
GROUPS = st.sampled_from(["g", "h", "i", "j"])
NUMBERS = st.integers(0, 10**6)
ERRORS = [
    SessionLost(),
    SandboxAtCapacity(),
    SandboxUnavailable(),
    SandboxUnavailable("refused", None, False),
    SandboxDraining(),
    WireError(),
    InfraError("final", None, None, False),
    CheckerError("wrong"),
]
OUTCOMES = st.sampled_from([None, *ERRORS])


class Histories(RuleBasedStateMachine):
    """A cluster as its driver sees it, kept apart from the scheduler's own books."""

    def __init__(self):
        super().__init__()
        self.scheduler, self.now = Scheduler(random.Random(1)), 0.0
        self.groups = {}  # open group -> (seeds, on_infra_error)
        self.up = {}  # node -> slots
        self.draining = {}  # node -> slots
        self.live = {}  # (group, index) -> the dispatch that is out: (attempt, node)
        self.sent = []  # every dispatch there ever was: (group, index, attempt, node)
        self.seeds = {}  # (group, index) -> seed, of open groups
        self.timers = {}  # timer -> at

    def do(self, *events):
        for command in self.scheduler.handle_all(events, self.now):
            self.obey(command)

    def obey(self, command):
        match command:
            case Dispatch():
                self.dispatched(command)
            case Cancel():
                for index, attempt in command.items:
                    assert self.live.pop((command.group_id, index)) == (attempt, command.node_id)
            case SetTimer():
                assert command.timer_id not in self.timers
                self.timers[command.timer_id] = command.at
            case CompleteGroup() | FailGroup():
                self.ended(command)

    def dispatched(self, command):
        assert command.node_id in self.up
        assert command.items
        for item in command.items:
            key = (item.group_id, item.index)
            assert key not in self.live
            assert not self.sent or item.attempt > self.sent[-1][2]
            assert self.groups[item.group_id][0][item.index] == item.seed
            self.live[key] = (item.attempt, command.node_id)
            self.sent.append((*key, item.attempt, command.node_id))
        assert self.load(command.node_id) <= self.up[command.node_id]

    def load(self, node):
        return sum(where == node for _, where in self.live.values())

    def ended(self, command):
        seeds, mode = self.groups.pop(command.group_id)
        assert not [key for key in self.live if key[0] == command.group_id]
        if isinstance(command, CompleteGroup):
            results = command.results
            assert mode == "mask" or all(result.valid for result in results)
        else:
            results = command.error.partial.results if isinstance(command.error, GroupFailed) else ()
            results = results or [GradeResult(None, valid=False, seed=seed) for seed in seeds]
        assert [result.seed for result in results] == list(seeds)
        assert all((result.reward is None) != result.valid for result in results)

    @initialize()
    def two_nodes(self):
        self.node_up("a", 4)
        self.node_up("b", 3)

    @rule(group=GROUPS, size=st.integers(0, 9), wait=st.none() | st.integers(0, 4), single=st.booleans(), n=NUMBERS)
    def submit(self, group, size, wait, single, n):
        seeds, mode = tuple(f"{n + i:064x}" for i in range(size)), ("raise", "mask")[n % 2]
        self.groups.setdefault(group, (seeds, mode))
        self.do(GroupSubmitted(group, seeds, None if wait is None else self.now + wait, mode, single))

    @precondition(lambda self: self.live)
    @rule(count=st.integers(1, 4), pick=NUMBERS, error=OUTCOMES)
    def answer(self, count, pick, error):
        """Answer some dispatches that are out, of one node, as a node's report does."""
        out = [(*key, *where) for key, where in self.live.items()]
        if not out:
            return
        node = out[pick % len(out)][3]
        events = [self.event(sent, error) for sent in out if sent[3] == node][:count]
        if isinstance(error, SandboxDraining) and node in self.up:
            self.draining[node] = self.up.pop(node)
        for event in events:
            # the scheduler may have ended the group at the first of them and cancelled the others
            self.live.pop((event.group_id, event.index), None)
            self.do(event)

    @rule(pick=NUMBERS, error=OUTCOMES)
    def answer_late(self, pick, error):
        """Answer a dispatch that is out no more: nothing may come of it."""
        late = [sent for sent in self.sent if self.live.get(sent[:2]) != sent[2:]]
        if late:
            assert self.scheduler.handle(self.event(late[pick % len(late)], error), self.now) == []

    def event(self, sent, error):
        if error is not None:
            return IndexFailed(*sent, error)
        group, index = sent[:2]
        seed = self.groups[group][0][index] if index < len(self.groups.get(group, ((),))[0]) else None
        return IndexDone(*sent, GradeResult(1.0, verdict=Verdict.PASSED, seed=seed))

    @rule(node=NODES, slots=st.integers(0, 5))
    def node_up(self, node, slots):
        self.draining.pop(node, None)
        self.up[node] = slots
        self.do(NodeUp(node, slots))

    @precondition(lambda self: self.up or self.draining)
    @rule(node=NODES, slots=st.integers(0, 5))
    def report(self, node, slots):
        for nodes in (self.up, self.draining):
            if node in nodes:
                nodes[node] = slots
        self.do(NodeReport(node, slots))

    @precondition(lambda self: self.up)
    @rule(node=NODES)
    def drain(self, node):
        if node in self.up:
            self.draining[node] = self.up.pop(node)
        self.do(NodeDraining(node))

    @precondition(lambda self: self.draining)
    @rule(node=NODES)
    def undrain(self, node):
        if node in self.draining:
            self.up[node] = self.draining.pop(node)
        self.do(NodeUndrained(node))

    @rule(node=NODES)
    def lose(self, node):
        self.up.pop(node, None)
        self.draining.pop(node, None)
        self.live = {key: where for key, where in self.live.items() if where[1] != node}
        self.do(NodeLost(node))

    @precondition(lambda self: self.timers)
    @rule()
    def next_timer(self):
        if self.timers:
            timer = min(self.timers, key=lambda timer: (self.timers[timer], timer))
            self.now = max(self.now, self.timers.pop(timer))
            self.do(TimerFired(timer), TimerFired(timer))

    @rule(group=GROUPS)
    def cancel(self, group):
        self.do(GroupCancelled(group))
        assert group not in self.groups

    @invariant()
    def holds(self):
        self.scheduler.validate()
        stats = self.scheduler.stats()
        assert stats["groups"] == len(self.groups)
        assert stats["running"] == len(self.live)

    def teardown(self):
        """Be fair: all nodes come up and everything out is answered; then every group must end."""
        for node in ("a", "b"):
            self.node_up(node, 4)
        for _ in range(100):
            self.next_timer()
            self.answer(4, 0, None)
            self.scheduler.validate()
        assert not self.groups


TestHistories = Histories.TestCase
TestHistories.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,  # the same histories in each run: a red run can be repeated
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)


def walk(rng, steps):
    """Take random steps of a Histories: longer ways than hypothesis goes, and more failures on them."""
    histories = Histories()
    histories.two_nodes()
    for number in range(steps):
        step(histories, rng, number)
        histories.holds()
    histories.teardown()


def step(histories, rng, number):
    error = rng.choice(ERRORS[: rng.choice((3, 4, 8))])
    node, kind = rng.choice("abcd"), rng.random()
    if kind < 0.2:
        wait = rng.choice((None, None, 3, 30))
        histories.submit(rng.choice("ghijklm"), rng.randrange(1, 12), wait, rng.random() < 0.3, number)
    elif kind < 0.55:
        histories.answer(rng.randrange(1, 5), rng.randrange(99), rng.choice((None, error, error)))
    elif kind < 0.6:
        histories.answer_late(rng.randrange(9999), rng.choice((None, error)))
    elif kind < 0.85:
        histories.next_timer()
    elif kind < 0.95:
        rng.choice((histories.node_up, histories.report))(node, rng.randrange(6))
    else:
        rng.choice((histories.drain, histories.undrain, histories.lose))(node)


@pytest.mark.parametrize("seed", range(20))
def test_long_histories(seed):
    walk(random.Random(seed), 400)
