"""Real Ray clusters of several raylets for the tests that import from here. conftest.py has isolated Ray before."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster

from collimate_ray.config import runtime_dir
from collimate_ray.grader import start, stop
from collimate_ray.handle import GraderHandle
from collimate_ray.sandbox.embedded import Daemon, stop_daemon

#: Longest wait for anything that should happen, s; generous, since these tests share two cores with others.
PATIENCE_S = 60.0

SQUARE = {
    "kind": "unit_tests",
    "entry": "solve",
    "scoring": "fraction",
    "tests": [{"input": [2], "expected": 4}, {"input": [3], "expected": 9}],
    "limits": {"time_s": 20},
}
RIGHT = "def solve(x):\n    return x * x\n"
PARTLY = "def solve(x):\n    return x + 2\n"
WRONG = "def solve(x):\n    return 'no'\n"
PROSE = "I would rather not."


def slow(seconds: float) -> str:
    """A right candidate that takes its time."""
    return f"import time\ntime.sleep({seconds})\n{RIGHT}"


@contextlib.contextmanager
def raylets(count: int) -> Iterator[Cluster]:
    """A cluster of ``count`` raylets, head included, with this process as its driver."""
    common: dict[str, Any] = {"num_cpus": 4, "object_store_memory": 80 << 20}
    cluster = Cluster(initialize_head=True, head_node_args={**common, "include_dashboard": False})
    try:
        for _ in range(count - 1):
            cluster.add_node(wait=False, **common)
        cluster.wait_for_nodes()
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


@contextlib.contextmanager
def started(nodes: int, **options: Any) -> Iterator[GraderHandle]:
    """A grader with all its nodes up; afterwards nothing of it may be left."""
    handle = start(**options)
    try:
        until(lambda: states(handle).count("up") == nodes)
        yield handle
    finally:
        pids = [node["daemon_pid"] for node in stats(handle)["nodes"].values()]
        stop(handle)
        until(lambda: not any(alive(pid) for pid in pids))
        assert not [path for path in Path(runtime_dir()).iterdir() if path.name != "tests"]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with raylets(3) as made:
        yield made


@pytest.fixture(scope="module")
def grader(cluster: Cluster) -> Iterator[GraderHandle]:
    with started(3, slots=2) as handle:
        yield handle


def stats(handle: GraderHandle) -> dict[str, Any]:
    found: dict[str, Any] = ray.get(handle.stats.remote(), timeout=PATIENCE_S)
    return found


def states(handle: GraderHandle) -> list[str]:
    return [node["state"] for node in stats(handle)["nodes"].values()]


def until(condition: Callable[[], Any], patience_s: float = PATIENCE_S) -> Any:
    """Wait for what another process does; gives what it waited for."""
    end = time.monotonic() + patience_s
    while not (found := condition()):
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.05)
    return found


def alive(pid: int) -> bool:
    """Whether a process lives; one that ended and waits for its parent does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def end_daemon(node: dict[str, Any]) -> None:
    """End the daemon of a node that is gone, as its own time-out would; ``node`` as ``stats`` had it."""
    stop_daemon(Daemon(node["daemon"], node["daemon_pid"], False))
