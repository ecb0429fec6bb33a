"""The scheduler as a function: the same events and seed give the same commands, at a cost that nodes don't raise."""

import gc
import hashlib
import os
import random
import statistics
import subprocess
import sys
import time

from collimate_ray.core import (
    Dispatch,
    GroupSubmitted,
    IndexDone,
    IndexFailed,
    NodeDraining,
    NodeLost,
    NodeUp,
    Scheduler,
    SetTimer,
    TimerFired,
)
from collimate_ray.errors import SandboxAtCapacity, SandboxUnavailable, SessionLost
from collimate_ray.results import GradeResult, Verdict

PASSED = GradeResult(1.0, verdict=Verdict.PASSED)


def history(seed, steps=400):
    """Drive a scheduler at random; give its events with their times, and its commands."""
    rng, scheduler = random.Random(seed), Scheduler(random.Random(7))
    log, commands, out, timers = [], [], [], []
    for step in range(steps):
        event = draw(rng, step, out, timers)
        now = step / 10
        log.append((event, now))
        new = scheduler.handle(event, now)
        commands.append(new)
        out += [(i, c.node_id) for c in new if isinstance(c, Dispatch) for i in c.items]
        timers += [c.timer_id for c in new if isinstance(c, SetTimer)]
    return log, commands


def draw(rng, step, out, timers):
    node = f"node{rng.randrange(6)}"
    kind = rng.random()
    if kind < 0.1:
        return NodeUp(node, 4)
    if kind < 0.13:
        return rng.choice([NodeDraining, NodeLost])(node)
    if kind < 0.3:
        return GroupSubmitted(f"g{step}", (f"{step:064x}",) * 8, step / 10 + 20, "mask", rng.random() < 0.5)
    if kind < 0.5 and timers:
        return TimerFired(timers.pop(0))
    if not out:
        return NodeUp(node, 4)
    item, where = out.pop(rng.randrange(len(out)))
    error = rng.choice([None, None, None, SessionLost(), SandboxUnavailable(), SandboxAtCapacity()])
    answer = (item.group_id, item.index, item.attempt, where)
    return IndexFailed(*answer, error) if error else IndexDone(*answer, PASSED)


def test_a_log_replays():
    log, commands = history(3)
    scheduler = Scheduler(random.Random(7))
    assert [scheduler.handle(event, now) for event, now in log] == commands
    assert sum(map(len, commands)) > 200


def test_another_process_decides_the_same():
    assert (
        digest()
        == subprocess.run(
            [sys.executable, __file__], env={**os.environ, "PYTHONHASHSEED": "11"}, capture_output=True, check=True
        ).stdout.decode()
    )


def digest():
    return hashlib.sha256(repr(history(5)[1]).encode()).hexdigest()


def cluster(nodes):
    """A full cluster of 8 slots a node with work that waits; give the scheduler and what runs."""
    scheduler = Scheduler(random.Random(0))
    for number in range(nodes):
        scheduler.handle(NodeUp(f"node{number}", 8), 0.0)
    seeds = ("0" * 64,) * (8 * nodes + 5000)
    shards = scheduler.handle(GroupSubmitted("g", seeds), 0.0)
    assert sum(len(shard.items) for shard in shards) == 8 * nodes
    return scheduler, [(item, shard.node_id) for shard in shards for item in shard.items]


def one_decision(scheduler, running):
    """Answer one index and have its slot filled; seconds."""
    item, node_id = running.pop(0)
    start = time.perf_counter()
    (shard,) = scheduler.handle(IndexDone("g", item.index, item.attempt, node_id, PASSED), 1.0)
    spent = time.perf_counter() - start
    running.append((shard.items[0], shard.node_id))
    return spent


def one_group(scheduler, name):
    """Place a group on an idle cluster and answer it; seconds."""
    start = time.perf_counter()
    for shard in scheduler.handle(GroupSubmitted(name, ("0" * 64,) * 16), 1.0):
        done = [IndexDone(name, item.index, item.attempt, shard.node_id, PASSED) for item in shard.items]
        scheduler.handle_all(done, 1.0)
    return time.perf_counter() - start


def idle(nodes):
    scheduler = Scheduler(random.Random(0))
    for number in range(nodes):
        scheduler.handle(NodeUp(f"node{number}", 8), 0.0)
    return scheduler


def ratio(small, large, rounds=1000):
    """Median of the large one's times over that of the small one, measured in turns."""
    times = ([], [])
    gc.disable()
    try:
        for number in range(rounds):
            times[0].append(small(number))
            times[1].append(large(number))
    finally:
        gc.enable()
    return statistics.median(times[1]) / statistics.median(times[0])


def test_a_decision_costs_the_same_with_a_thousand_nodes_full():
    small, large = cluster(16), cluster(1000)
    assert ratio(lambda _: one_decision(*small), lambda _: one_decision(*large)) < 3


def test_a_decision_costs_the_same_with_a_thousand_nodes_idle():
    small, large = idle(16), idle(1000)
    assert ratio(lambda n: one_group(small, f"g{n}"), lambda n: one_group(large, f"g{n}"), 200) < 3


if __name__ == "__main__":
    sys.stdout.write(digest())
