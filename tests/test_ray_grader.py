"""The grader on a real cluster of three raylets: calls, answers, errors, drains, other processes of the cluster."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
from typing import Any

import pytest
import ray
from conftest_ray import (
    PARTLY,
    PATIENCE_S,
    PROSE,
    RIGHT,
    SQUARE,
    WRONG,
    cluster,
    grader,
    slow,
    stats,
    until,
)
from leftovers import Watch
from ray.cluster_utils import Cluster

from collimate_ray.errors import CheckerError, ConfigError, GraderClosed, GroupFailed, SpecError
from collimate_ray.grader import get, start, stop
from collimate_ray.handle import GraderHandle
from collimate_ray.messages import GraderConfig
from collimate_ray.node import actor_name
from collimate_ray.results import GroupResult, Verdict
from collimate_ray.seeds import seed_from_key
from collimate_ray.spec import spec_from_dict

__all__ = ["cluster", "grader"]

NAMESPACE = "collimate"


def wait(ref: Any) -> Any:
    return ray.get(ref, timeout=PATIENCE_S)


def test_group_comes_back_whole_and_in_order(grader: GraderHandle) -> None:
    completions = [RIGHT, PARTLY, WRONG, PROSE] * 3
    group = wait(grader.grade_group.remote(completions, SQUARE, seeds="crn", group_id="order"))
    assert group.rewards.tolist() == [1.0, 0.5, 0.0, 0.0] * 3
    assert group.valid.all()
    assert [result.verdict for result in group.results[:4]] == [
        Verdict.PASSED,
        Verdict.FAILED,
        Verdict.FAILED,
        Verdict.NO_CODE,
    ]
    assert {result.seed for result in group.results} == {seed_from_key("order")}
    assert {result.node_id for result in group.results} <= set(stats(grader)["nodes"])


def test_same_request_gets_the_same_answer(grader: GraderHandle) -> None:
    def ask() -> GroupResult:
        found: GroupResult = wait(grader.grade_group.remote([slow(0.2)] * 2, SQUARE, group_id="twice"))
        return found

    done = stats(grader)["grades"]
    first, second = ask(), ask()
    assert [r.seed for r in first.results] == [r.seed for r in second.results]
    assert stats(grader)["grades"] == done + 2


def test_single_rollouts(grader: GraderHandle) -> None:
    spec = spec_from_dict(SQUARE)
    refs = [grader.grade.remote(text, spec, group_id="s", index=i) for i, text in enumerate([RIGHT, WRONG, PARTLY])]
    assert [result.reward for result in wait(refs)] == [1.0, 0.0, 0.5]


def test_groups_in_one_call(grader: GraderHandle) -> None:
    asked = [
        {"completions": [RIGHT, WRONG], "spec": SQUARE},
        {"completions": [], "spec": SQUARE, "seeds": "crn"},
    ]
    answers = wait(grader.grade_groups.remote(asked))
    assert [answer.rewards.tolist() for answer in answers] == [[1.0, 0.0], []]


def test_big_spec_travels_once(grader: GraderHandle) -> None:
    big = {**SQUARE, "prelude": "# " + "x" * 200_000}
    handle = pickle.loads(pickle.dumps(grader))
    answers = wait([handle.grade_group.remote([RIGHT], big) for _ in range(3)])
    assert [answer.rewards.tolist() for answer in answers] == [[1.0]] * 3
    assert len(handle._parcels) == 1


def test_wrong_call_is_told_at_the_call(grader: GraderHandle) -> None:
    with pytest.raises(ConfigError, match=r"completions\[0\]"):
        grader.grade_group.remote([1], SQUARE)
    with pytest.raises(ConfigError, match="completion: expected a str"):
        grader.grade.remote(None, SQUARE)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="index"):
        grader.grade.remote(RIGHT, SQUARE, index=-1)
    with pytest.raises(SpecError):
        grader.grade_group.remote([RIGHT], {**SQUARE, "unknown": 1})
    with pytest.raises(ConfigError, match=r"groups\[0\]: expected a dict with completions and spec"):
        grader.grade_groups.remote([{"completions": []}])
    with pytest.raises(TypeError, match=r"GraderHandle\.grade_group\(\) got an unexpected"):
        grader.grade_group.remote([RIGHT], SQUARE, nonsense=1)  # type: ignore[call-arg]


def test_spec_whose_own_code_fails(grader: GraderHandle) -> None:
    spec = {
        "kind": "property",
        "entry": "solve",
        "reference": "def reference(x):\n    raise ValueError('broken')\n",
        "generator": "def generate(rng):\n    return [rng.randrange(9)]\n",
    }
    with pytest.raises(CheckerError):
        wait(grader.grade_group.remote([RIGHT], spec, on_infra_error="mask"))


def test_property_shares_its_cases(grader: GraderHandle) -> None:
    spec = {
        "kind": "property",
        "entry": "solve",
        "k": 4,
        "reference": "def reference(x):\n    return x * x\n",
        "generator": "def generate(rng):\n    return [rng.randrange(3, 99)]\n",
    }
    group = wait(grader.grade_group.remote([RIGHT, WRONG] * 4, spec, seeds="crn"))
    assert group.rewards.tolist() == [1.0, 0.0] * 4


def test_deadline_fails_the_group_with_what_there_is(grader: GraderHandle) -> None:
    ref = grader.grade_group.remote([PROSE] + [slow(30)] * 3, SQUARE, deadline_s=3, group_id="late")
    with pytest.raises(GroupFailed) as caught:
        wait(ref)
    assert "group late: deadline" in str(caught.value)
    assert caught.value.partial.valid.tolist() == [True, False, False, False]
    until(lambda: not any(node["running"] for node in stats(grader)["nodes"].values()))


def test_deadline_masks_what_is_missing(grader: GraderHandle) -> None:
    ref = grader.grade_group.remote([PROSE, slow(30)], SQUARE, deadline_s=3, on_infra_error="mask")
    group = wait(ref)
    assert group.valid.tolist() == [True, False]
    assert group.results[1].reward is None
    assert group.results[1].error == "GroupFailed"


def test_cancel(grader: GraderHandle) -> None:
    ref = grader.grade_group.remote([slow(30)] * 8, SQUARE, group_id="unwanted")
    until(lambda: stats(grader)["open_groups"] == 1)
    assert wait(grader.cancel.remote("unwanted")) == 1
    with pytest.raises(GroupFailed, match="cancelled"):
        wait(ref)
    assert wait(grader.grade.remote(RIGHT, SQUARE)).reward == 1.0


def test_ray_cancel_frees_the_slots(grader: GraderHandle) -> None:
    ref = grader.grade_group.remote([slow(30)] * 8, SQUARE)
    until(lambda: stats(grader)["open_groups"] == 1)
    ray.cancel(ref)
    until(lambda: stats(grader)["open_groups"] == 0)


def test_drained_node_gets_nothing_new_while_its_work_ends(grader: GraderHandle) -> None:
    ref = grader.grade_group.remote([slow(2)] * 6, SQUARE)
    nodes = until(lambda: all(n["running"] for n in stats(grader)["nodes"].values()) and stats(grader)["nodes"])
    node_id = next(iter(nodes))
    try:
        assert wait(grader.drain_node.remote(node_id[:8])) == node_id
        assert stats(grader)["nodes"][node_id]["state"] == "draining"
        group = wait(ref)
        assert group.valid.all()
        assert {result.attempt for result in group.results} == {0}
        assert node_id in {result.node_id for result in group.results}
        after = wait(grader.grade_group.remote([RIGHT] * 8, SQUARE))
        assert node_id not in {result.node_id for result in after.results}
    finally:
        wait(grader.undrain_node.remote(node_id))
    until(lambda: node_id in {r.node_id for r in wait(grader.grade_group.remote([RIGHT] * 8, SQUARE)).results})


def test_drain_of_nobody(grader: GraderHandle) -> None:
    wrongs: list[Any] = ["ffff0000ffff", "", "abc", 5]
    for wrong in wrongs:
        with pytest.raises(ConfigError, match="node_id: expected"):
            wait(grader.drain_node.remote(wrong))


def test_concurrent_starts_make_one(grader: GraderHandle) -> None:
    @ray.remote(num_cpus=1)
    def start_and_grade() -> float:
        result = ray.get(start().grade.remote(RIGHT, SQUARE))
        return float(result.reward)

    assert wait([start_and_grade.remote() for _ in range(4)]) == [1.0] * 4
    names = [row["name"] for row in ray.util.list_named_actors(all_namespaces=True)]
    assert names.count("grader") == 1
    assert len(names) == 4


def test_grader_lives_on_the_node_of_the_driver_that_started_it(grader: GraderHandle) -> None:
    where = grader.actor().__ray_call__.remote(lambda self: ray.get_runtime_context().get_node_id())
    assert wait(where) == ray.get_runtime_context().get_node_id()


_OTHER_JOB = """
import json, sys, ray, collimate_ray.grader
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR", namespace="another")
handle = collimate_ray.grader.get()
group = ray.get(handle.grade_group.remote(json.loads(sys.argv[2]), json.loads(sys.argv[3])))
print(json.dumps(group.rewards.tolist()))
"""


def test_driver_of_another_job_finds_it(cluster: Cluster, grader: GraderHandle) -> None:
    arguments = [cluster.address, json.dumps([RIGHT, WRONG]), json.dumps(SQUARE)]
    done = subprocess.run(
        [sys.executable, "-c", _OTHER_JOB, *arguments],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
    )
    assert json.loads(done.stdout.splitlines()[-1]) == [1.0, 0.0]


def test_nobody_there(cluster: Cluster) -> None:
    with pytest.raises(GraderClosed, match="no grader 'nobody'"):
        get("nobody")
    with pytest.raises(GraderClosed, match="no grader 'nobody'"):
        GraderHandle("nobody").grade.remote(RIGHT, SQUARE)
    stop("nobody")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"slots": 0}, "slots: expected a whole number of at least 1, found 0"),
        ({"memory_mib": 1.5}, "memory_mib"),
        ({"name": ""}, "name"),
        ({"schedulers": 2}, "schedulers: expected 1, found 2"),
        ({"idle_timeout_s": 0}, "idle_timeout_s"),
        ({"daemon": 7}, "daemon"),
        ({"require_tier": "microvm"}, r"require_tier: expected one of full, .*, found 'microvm'"),
    ],
)
def test_wrong_start(cluster: Cluster, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        start(**options)


def test_start_that_no_node_can_obey_leaves_nothing(grader: GraderHandle) -> None:
    with pytest.raises(ConfigError, match=r"template: expected one of .*, found 'nonesuch'"):
        start(name="strict", template="nonesuch")
    # a killed actor's name goes a moment after ray.kill returns
    until(lambda: not [row for row in ray.util.list_named_actors(all_namespaces=True) if "strict" in row["name"]])


def test_node_actor_that_dies_is_made_anew_and_adopts_its_daemon(grader: GraderHandle) -> None:
    ref = grader.grade_group.remote([slow(0.5)] * 12, SQUARE)
    before = until(lambda: all(n["running"] for n in stats(grader)["nodes"].values()) and stats(grader)["nodes"])
    node_id = next(iter(before))
    ray.kill(ray.get_actor(actor_name(GraderConfig(), node_id), namespace=NAMESPACE), no_restart=False)
    assert wait(ref).rewards.tolist() == [1.0] * 12
    until(lambda: stats(grader)["nodes"][node_id]["state"] == "up")
    assert stats(grader)["nodes"][node_id]["daemon_pid"] == before[node_id]["daemon_pid"]


def test_daemon_that_dies_is_started_anew(grader: GraderHandle, no_leftovers: Watch) -> None:
    ref = grader.grade_group.remote([slow(0.5)] * 12, SQUARE)
    before = until(lambda: all(n["running"] for n in stats(grader)["nodes"].values()) and stats(grader)["nodes"])
    node_id = next(iter(before))
    os.kill(before[node_id]["daemon_pid"], signal.SIGKILL)
    assert wait(ref).rewards.tolist() == [1.0] * 12
    until(lambda: stats(grader)["nodes"][node_id]["daemon_pid"] != before[node_id]["daemon_pid"])
    until(lambda: stats(grader)["nodes"][node_id]["state"] == "up")
    no_leftovers.rebase()  # the new daemon is the fixture's
