"""A raylet killed under load: nothing is lost, nothing is counted twice."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import ray
from conftest_ray import (
    PARTLY,
    PATIENCE_S,
    PROSE,
    RIGHT,
    SQUARE,
    WRONG,
    alive,
    cluster,
    end_daemon,
    slow,
    started,
    stats,
    until,
)
from ray.cluster_utils import Cluster
from ray.core.generated import autoscaler_pb2

__all__ = ["cluster"]

#: Groups of 16, in four orders. Half of the members have no code: the run is about the groups, not about CPU time.
MEMBERS = [RIGHT, PARTLY, WRONG, PROSE, RIGHT, PROSE, PARTLY, PROSE] * 2
PATTERNS = [MEMBERS[turn:] + MEMBERS[:turn] for turn in range(4)]
GROUPS = 64


def other_node(cluster: Cluster) -> Any:
    """A node that has neither this driver nor, therefore, the grader."""
    here = ray.get_runtime_context().get_node_id()
    return next(node for node in cluster.worker_nodes if node.node_id != here)


def test_raylet_killed_in_the_middle_loses_nothing(cluster: Cluster) -> None:
    with started(3, slots=2) as grader:
        calm = ray.get([grader.grade_group.remote(pattern, SQUARE, seeds="crn") for pattern in PATTERNS])
        victim = other_node(cluster)
        orphan = stats(grader)["nodes"][victim.node_id]
        refs = [
            grader.grade_group.remote(PATTERNS[number % 4], SQUARE, seeds="crn", group_id=f"group-{number}")
            for number in range(GROUPS)
        ]
        until(lambda: stats(grader)["nodes"][victim.node_id]["running"] and stats(grader)["grades"] >= 300)
        killed = time.monotonic()
        cluster.remove_node(victim, allow_graceful=False)
        until(lambda: stats(grader)["nodes"].get(victim.node_id, {"state": "gone"})["state"] != "up")
        assert time.monotonic() - killed < 10, "its death must not wait for Ray's health checks"
        groups = ray.get(refs, timeout=4 * PATIENCE_S)
        end_daemon(orphan)
        for number, group in enumerate(groups):
            assert group.group_id == f"group-{number}"
            assert group.valid.all()
            assert np.array_equal(group.rewards, calm[number % 4].rewards)
        seen = stats(grader)
        assert seen["grades"] == 16 * (GROUPS + len(PATTERNS))
        assert seen["groups_failed"] == 0


def test_node_that_ray_drains_ends_its_work_and_is_let_go(cluster: Cluster) -> None:
    count = len(cluster.list_all_nodes())
    with started(count, slots=2) as grader:
        ref = grader.grade_group.remote([slow(3)] * (2 * count), SQUARE)
        node = other_node(cluster)
        victim = node.node_id
        until(lambda: stats(grader)["nodes"][victim]["running"] == 2)
        pid = stats(grader)["nodes"][victim]["daemon_pid"]
        gcs = ray._raylet.GcsClient(address=cluster.address)
        accepted, why = gcs.drain_node(victim, autoscaler_pb2.DRAIN_NODE_REASON_PREEMPTION, "a test", 0)
        assert accepted, why
        until(lambda: stats(grader)["nodes"][victim]["state"] == "draining")
        assert stats(grader)["nodes"][victim]["running"] == 2
        group = ray.get(ref, timeout=PATIENCE_S)
        assert group.rewards.tolist() == [1.0] * (2 * count)
        assert [result.node_id for result in group.results].count(victim) == 2
        until(lambda: stats(grader)["nodes"].get(victim, {"state": "released"})["state"] == "released")
        until(lambda: not alive(pid))
        assert ray.get(grader.grade.remote(RIGHT, SQUARE)).reward == 1.0
        cluster.remove_node(node, allow_graceful=False)  # Ray ends it by itself; this reaps it
