"""The scheduler, rule by rule: events in, commands out."""

import ast
import random
from pathlib import Path

import pytest

import collimate_ray.core
from collimate_ray.core import (
    Cancel,
    CompleteGroup,
    Dispatch,
    FailGroup,
    GroupCancelled,
    GroupSubmitted,
    IndexDone,
    IndexFailed,
    InvariantViolated,
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
    ConfigError,
    GroupFailed,
    InfraError,
    SandboxAtCapacity,
    SandboxDraining,
    SandboxUnavailable,
    SessionLost,
    WireError,
)
from collimate_ray.errors import NodeLost as NodeLostError
from collimate_ray.results import GradeResult, Verdict

PASSED = GradeResult(1.0, verdict=Verdict.PASSED)


class Bench:
    """A scheduler that is validated after each event, and short forms of the events."""

    def __init__(self, *nodes, slots=4, seed=0):
        self.scheduler, self.now = Scheduler(random.Random(seed)), 0.0
        for node in nodes:
            self.do(NodeUp(node, slots))

    def do(self, *events):
        commands = self.scheduler.handle_all(events, self.now)
        self.scheduler.validate()
        return commands

    def submit(self, group="g", size=1, **kwargs):
        return self.do(GroupSubmitted(group, tuple(f"{i:064x}" for i in range(size)), **kwargs))

    def done(self, dispatch, result=PASSED):
        return self.do(*(IndexDone(i.group_id, i.index, i.attempt, dispatch.node_id, result) for i in dispatch.items))

    def fail(self, dispatch, error):
        items = dispatch.items
        return self.do(*(IndexFailed(i.group_id, i.index, i.attempt, dispatch.node_id, error) for i in items))

    def fire(self, timer):
        self.now = max(self.now, timer.at)
        return self.do(TimerFired(timer.timer_id))


def of(kind, commands):
    return [command for command in commands if isinstance(command, kind)]


def only(kind, commands):
    (found,) = of(kind, commands)
    return found


def places(commands):
    return [(d.node_id, [(i.index, i.attempt) for i in d.items]) for d in of(Dispatch, commands)]


# --- placement


def test_an_empty_group_completes_at_once():
    assert Bench().submit(size=0) == [CompleteGroup("g", ())]


def test_work_waits_for_a_node_and_completes_in_order():
    bench = Bench()
    assert bench.submit(size=3) == []
    bench.now = 2.0
    dispatch = only(Dispatch, bench.do(NodeUp("n", 4)))
    assert [item.seed for item in dispatch.items] == [f"{i:064x}" for i in range(3)]
    for index in (2, 0):
        result = GradeResult(index / 4, verdict=Verdict.FAILED)
        assert bench.do(IndexDone("g", index, index + 1, "n", result)) == []
    complete = only(CompleteGroup, bench.do(IndexDone("g", 1, 2, "n", PASSED)))
    assert [result.reward for result in complete.results] == [0.0, 1.0, 0.5]
    assert {(r.node_id, r.attempt, r.queue_time_ms) for r in complete.results} == {("n", 0, 2000.0)}


def test_a_group_spreads_over_the_nodes_with_room():
    commands = Bench("a", "b", "c", "d", slots=16).submit(size=16)
    assert sorted(len(dispatch.items) for dispatch in commands) == [4, 4, 4, 4]


def test_no_node_is_sent_more_than_it_has_slots():
    bench = Bench("a", slots=3)
    dispatch = only(Dispatch, bench.submit(size=8))
    assert len(dispatch.items) == 3
    assert bench.do(NodeReport("a", 1)) == []
    assert bench.do(IndexDone("g", 0, 1, "a", PASSED)) == []
    assert places(bench.do(NodeReport("a", 3))) == [("a", [(3, 4)])]


def test_groups_take_turns():
    bench = Bench("a", slots=4)
    first = only(Dispatch, bench.submit("big", 1000))
    assert bench.submit("small", 4) == []
    second = only(Dispatch, bench.done(first))
    third = only(Dispatch, bench.done(second))
    assert {second.items[0].group_id, third.items[0].group_id} == {"big", "small"}


def test_of_two_nodes_the_one_with_more_room_is_chosen():
    bench = Bench("a", slots=1)
    bench.do(NodeUp("b", 9))
    assert places(bench.submit(size=1)) == [("b", [(0, 1)])]


def test_slots_that_come_free_together_are_filled_by_one_call():
    bench = Bench("a", slots=4)
    first = only(Dispatch, bench.submit(size=8))
    assert places(bench.done(first)) == [("a", [(4, 5), (5, 6), (6, 7), (7, 8)])]


def test_a_group_that_is_open_is_not_opened_again():
    bench = Bench("a")
    assert len(bench.submit(size=2)) == 1
    assert bench.submit(size=2) == []


def test_single_submissions_wait_for_each_other_and_share_a_call():
    bench = Bench("a")
    timer = only(SetTimer, bench.submit("x", single=True))
    assert timer.at == pytest.approx(0.005)
    assert bench.submit("y", single=True) == []
    dispatch = only(Dispatch, bench.fire(timer))
    assert [item.group_id for item in dispatch.items] == ["x", "y"]
    assert [command.group_id for command in bench.done(dispatch)] == ["x", "y"]


def test_a_single_submission_that_was_cancelled_leaves_the_others_alone():
    bench = Bench("a")
    timer = only(SetTimer, bench.submit("x", single=True))
    assert only(FailGroup, bench.do(GroupCancelled("x"))).group_id == "x"
    assert bench.submit("y", single=True) == []
    assert [item.group_id for item in only(Dispatch, bench.fire(timer)).items] == ["y"]


# --- drain and capacity


def test_work_that_a_draining_node_refused_goes_elsewhere_uncharged():
    bench = Bench("a")
    first = only(Dispatch, bench.submit())
    bench.do(NodeUp("b", 4))
    second = only(Dispatch, bench.fail(first, SandboxDraining()))
    assert (second.node_id, second.items[0].attempt) == ("b", 2)
    assert second.items[0].seed == first.items[0].seed
    assert only(CompleteGroup, bench.done(second)).results[0].attempt == 0


def test_a_draining_node_finishes_its_work_and_gets_none_until_undrained():
    bench = Bench("a")
    first = only(Dispatch, bench.submit("x"))
    assert bench.do(NodeDraining("a")) == []
    assert bench.submit("y") == []
    assert only(CompleteGroup, bench.done(first)).group_id == "x"
    assert places(bench.do(NodeUndrained("a"))) == [("a", [(0, 2)])]


def test_a_full_node_rests_longer_each_time_until_a_verdict():
    bench = Bench("a")
    dispatch, pauses = only(Dispatch, bench.submit(size=2)), []
    for _ in range(7):
        timer = only(SetTimer, bench.fail(dispatch, SandboxAtCapacity()))
        pauses.append(timer.at - bench.now)
        dispatch = only(Dispatch, bench.fire(timer))
    for pause, cap in zip(pauses, (0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0), strict=True):
        assert cap / 2 <= pause <= cap
    assert [r.attempt for r in only(CompleteGroup, bench.done(dispatch)).results] == [0, 0]


def test_a_full_node_is_used_again_after_its_next_verdict():
    bench = Bench("a", slots=2)
    bench.submit(size=2)
    assert len(bench.do(IndexFailed("g", 0, 1, "a", SandboxAtCapacity()))) == 1
    assert places(bench.do(IndexDone("g", 1, 2, "a", PASSED))) == [("a", [(0, 3)])]


def test_a_session_death_does_not_end_the_rest_of_a_full_node():
    bench = Bench("a", slots=2)
    bench.submit(size=2)
    bench.do(IndexFailed("g", 0, 1, "a", SandboxAtCapacity()))
    assert bench.do(IndexFailed("g", 1, 2, "a", SessionLost())) == []


# --- session death


def test_a_session_death_is_tried_elsewhere_and_the_second_one_is_a_crash():
    bench = Bench("a", "b")
    first = only(Dispatch, bench.submit())
    second = only(Dispatch, bench.fail(first, SessionLost()))
    assert second.node_id != first.node_id
    (result,) = only(CompleteGroup, bench.fail(second, SessionLost())).results
    assert (result.verdict, result.reward, result.valid) == (Verdict.CRASHED, 0.0, True)
    assert (result.evidence, result.attempt, result.node_id) == ({"session_death": 2}, 1, second.node_id)
    assert result.seed == first.items[0].seed


def test_a_session_death_waits_for_the_other_node_but_not_for_one_that_is_gone():
    bench = Bench("a", slots=1)
    first = only(Dispatch, bench.submit("x"))
    bench.do(NodeUp("b", 1))
    other = only(Dispatch, bench.submit("y"))
    assert (first.node_id, other.node_id) == ("a", "b")
    assert bench.fail(first, SessionLost()) == []
    moved = only(Dispatch, bench.do(NodeLost("b")))
    assert (moved.node_id, [item.group_id for item in moved.items]) == ("a", ["x"])


def test_a_session_death_on_the_only_node_is_tried_there():
    bench = Bench("a")
    second = only(Dispatch, bench.fail(only(Dispatch, bench.submit()), SessionLost()))
    assert only(CompleteGroup, bench.done(second)).results[0].attempt == 1


# --- host death


@pytest.mark.parametrize("error", [SandboxUnavailable(), WireError(), NodeLostError()])
def test_a_host_death_goes_elsewhere_and_makes_the_node_suspect(error):
    bench = Bench("a", "b")
    first = only(Dispatch, bench.submit())
    commands = bench.fail(first, error)
    second = only(Dispatch, commands)
    assert second.node_id != first.node_id
    assert only(SetTimer, commands).at == 1.0
    assert only(CompleteGroup, bench.done(second)).results[0].attempt == 1


def test_a_suspect_node_gets_one_candidate_at_a_time_until_a_verdict():
    bench = Bench("a")
    first = only(Dispatch, bench.submit(size=4))
    timer = only(SetTimer, bench.fail(first, SandboxUnavailable("refused", None, False)))
    probe = only(Dispatch, bench.fire(timer))
    assert len(probe.items) == 1
    timer = only(SetTimer, bench.fail(probe, SandboxUnavailable("refused", None, False)))
    probe = only(Dispatch, bench.fire(timer))
    assert len(probe.items) == 1
    assert len(only(Dispatch, bench.done(probe)).items) == 3


@pytest.mark.parametrize("sign", [NodeUp("a", 4), NodeReport("a", 4)])
def test_a_suspect_node_is_trusted_after_a_sign_of_life(sign):
    bench = Bench("a")
    timer = only(SetTimer, bench.fail(only(Dispatch, bench.submit(size=4)), SandboxUnavailable()))
    assert len(only(Dispatch, bench.do(sign)).items) == 4
    assert bench.fire(timer) == []


def test_a_candidate_that_was_refused_before_it_ran_is_never_poison():
    bench = Bench("a")
    dispatch = only(Dispatch, bench.submit())
    for _ in range(5):
        timer = only(SetTimer, bench.fail(dispatch, SandboxUnavailable("refused", None, False)))
        dispatch = only(Dispatch, bench.fire(timer))
    assert only(CompleteGroup, bench.done(dispatch)).results[0].attempt == 0


def three_host_deaths(bench, size, mode):
    commands = bench.submit(size=size, on_infra_error=mode)
    for node in ("a", "b", "c"):
        assert places(commands)[-1][0] == node
        commands = bench.do(NodeLost(node), NodeUp(chr(ord(node) + 1), 4))
    return commands


def test_the_third_host_death_fails_the_group_with_what_it_has():
    commands = three_host_deaths(Bench("a"), 2, "raise")
    failed = only(FailGroup, commands).error
    assert isinstance(failed, GroupFailed)
    assert failed.message == "member 0: Poison: 3 hosts died under it (node c)"
    assert (failed.node_id, failed.retriable) == ("c", False)
    assert not of(Cancel, commands)  # the node is not there to be told
    assert [result.error for result in failed.partial.results] == ["Poison", "GroupFailed"]


def test_the_third_host_death_leaves_the_group_whole_under_mask():
    commands = three_host_deaths(Bench("a"), 2, "mask")
    results = only(CompleteGroup, commands).results
    assert [(r.reward, r.valid, r.error, r.seed) for r in results] == [
        (None, False, "Poison", f"{i:064x}") for i in range(2)
    ]


def test_the_loss_of_a_node_moves_its_work_and_its_late_answers_are_dropped():
    bench = Bench("a")
    first = only(Dispatch, bench.submit(size=2))
    bench.do(NodeUp("b", 4))
    second = only(Dispatch, bench.do(NodeLost("a")))
    assert places([second]) == [("b", [(0, 3), (1, 4)])]
    assert bench.done(first) == bench.fail(first, SessionLost()) == bench.do(NodeLost("a")) == []
    assert [r.attempt for r in only(CompleteGroup, bench.done(second)).results] == [1, 1]


def test_an_answer_for_an_earlier_group_of_that_name_is_dropped():
    bench = Bench("a")
    first = only(Dispatch, bench.submit())
    bench.do(GroupCancelled("g"))
    second = only(Dispatch, bench.submit())
    assert bench.done(first) == []
    assert only(CompleteGroup, bench.done(second)).group_id == "g"


# --- ends of groups


@pytest.mark.parametrize("mode", ["raise", "mask"])
@pytest.mark.parametrize("error", [CheckerError("generator: raised"), ConfigError("template: unknown")])
def test_a_wrong_spec_or_call_fails_the_group_with_that_very_error(mode, error):
    bench = Bench("a")
    bench.submit(size=2, on_infra_error=mode)
    commands = bench.do(IndexFailed("g", 0, 1, "a", error))
    assert commands == [Cancel("a", "g", ((1, 2),)), FailGroup("g", error)]


def test_an_infra_error_that_is_not_retriable_is_final():
    bench = Bench("a")
    bench.submit(on_infra_error="mask")
    commands = bench.do(IndexFailed("g", 0, 1, "a", InfraError("no", None, None, False)))
    assert only(CompleteGroup, commands).results[0].error == "InfraError"


def test_the_deadline_fails_a_group_with_what_it_has():
    bench = Bench("a", slots=2)
    timer = only(SetTimer, bench.submit(size=4, deadline=9.0))
    assert (timer.at, timer.group_id) == (9.0, "g")
    bench.do(IndexDone("g", 0, 1, "a", PASSED))
    cancel, fail = bench.fire(timer)
    assert cancel == Cancel("a", "g", ((1, 2), (2, 3)))
    assert fail.error.message == "deadline reached with 1 of 4 members graded"
    assert fail.error.partial.valid.tolist() == [True, False, False, False]
    assert len(only(Dispatch, bench.submit("next", 2)).items) == 2


def test_the_deadline_completes_a_group_under_mask():
    bench = Bench()
    timer = only(SetTimer, bench.submit(size=2, deadline=9.0, on_infra_error="mask"))
    complete = only(CompleteGroup, bench.fire(timer))
    assert [result.error for result in complete.results] == ["GroupFailed", "GroupFailed"]


def test_a_group_whose_deadline_has_passed_runs_nothing():
    bench = Bench("a")
    bench.now = 5.0
    assert [type(command) for command in bench.submit(deadline=5.0)] == [FailGroup]


def test_a_cancelled_group_fails_and_its_work_is_stopped():
    bench = Bench("a")
    bench.submit(size=2, on_infra_error="mask")
    cancel, fail = bench.do(GroupCancelled("g"))
    assert cancel == Cancel("a", "g", ((0, 1), (1, 2)))
    assert fail.error.message == "cancelled"
    assert bench.do(GroupCancelled("g")) == []


# --- story and self-check


def test_the_story_tells_why_and_stays_bounded():
    bench = Bench("a")
    dispatch = only(Dispatch, bench.submit())
    assert bench.scheduler.story("g")[-1] == "0.000 [0] to node a, dispatch 1"
    for _ in range(120):
        timer = only(SetTimer, bench.fail(dispatch, SandboxAtCapacity()))
        dispatch = only(Dispatch, bench.fire(timer))
    assert len(bench.scheduler.story("g")) == 200
    bench.done(dispatch)
    assert bench.scheduler.story("g")[-1].endswith("completed: all members graded")
    for number in range(100):
        bench.done(only(Dispatch, bench.submit(f"later{number}")))
    assert bench.scheduler.story("g") == []


def test_a_contradiction_is_told_with_the_story():
    bench = Bench("a")
    bench.submit()
    bench.scheduler._groups.open["g"].records[0].seed = "another"
    with pytest.raises(InvariantViolated, match=r"a seed has changed\n0.000 submitted"):
        bench.scheduler.validate()


def test_stats_count_what_waits_and_runs():
    bench = Bench("a", slots=2)
    bench.submit(size=5)
    node = {"state": "up", "pace": "open", "slots": 2, "running": 2}
    assert bench.scheduler.stats() == {"groups": 1, "queued": 3, "running": 2, "nodes": {"a": node}}


def test_core_imports_nothing_that_does_io():
    allowed = {"__future__", "collections", "dataclasses", "enum", "itertools", "random", "typing", "collimate_ray"}
    for path in Path(collimate_ray.core.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert {name.split(".")[0] for name in names} <= allowed, path.name
