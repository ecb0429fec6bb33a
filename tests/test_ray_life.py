"""Lives of the actors on a single raylet: ended, killed, idle, and hosts that die under a candidate."""

from __future__ import annotations

import socketserver
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from typing import Any

import numpy as np
import pytest
import ray
from collimate_rl.local_backend import LocalCollimateBackend
from conftest_ray import PARTLY, PATIENCE_S, PROSE, RIGHT, SQUARE, raylets, started, stats, until
from ray.cluster_utils import Cluster

from collimate_ray.config import runtime_dir
from collimate_ray.errors import CheckerError, ConfigError, GraderClosed, GroupFailed
from collimate_ray.grader import get, start, stop


@pytest.fixture(scope="module")
def node() -> Iterator[Cluster]:
    with raylets(1) as made:
        yield made


class DyingDaemon(BaseHTTPRequestHandler):
    """Healthy, until it is asked to run something: then the connection breaks."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        body = b'{"status": "ok", "templates": ["python"], "features": [], "pid": 1}'
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.close_connection = True

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def dying_daemon() -> Iterator[str]:
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), DyingDaemon) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def test_the_published_stand_in_grades_too(node: Cluster) -> None:
    backend = LocalCollimateBackend(templates={"python": {"interpreter": sys.executable}})
    asserts = {"kind": "assert_tests", "test_code": "assert solve(3) == 9", "entry": "solve"}
    with backend, started(1, daemon=backend.base_url, slots=2) as grader:
        group = ray.get(grader.grade_group.remote([RIGHT, PARTLY, PROSE], SQUARE))
        assert group.rewards.tolist() == [1.0, 0.5, 0.0]
        assert ray.get(grader.grade.remote(RIGHT, asserts)).reward == 1.0


def test_no_verdict_is_never_a_reward(node: Cluster, dying_daemon: str) -> None:
    with started(1, daemon=dying_daemon, slots=2) as grader:
        with pytest.raises(GroupFailed) as caught:
            ray.get(grader.grade_group.remote([PROSE, RIGHT], SQUARE), timeout=PATIENCE_S)
        assert caught.value.partial.valid[1] == np.False_
        masked = ray.get(grader.grade_group.remote([RIGHT], SQUARE, on_infra_error="mask"), timeout=PATIENCE_S)
        assert masked.valid.tolist() == [False]
        assert masked.results[0].reward is None
        assert masked.results[0].error == "Poison"
        assert stats(grader)["infra_errors"]["SandboxUnavailable"] >= 3


def test_restarted_grader_is_found_by_an_old_handle(node: Cluster) -> None:
    with started(1) as grader:
        assert ray.get(grader.grade.remote(RIGHT, SQUARE)).reward == 1.0
        waiting = grader.grade_group.remote([RIGHT] * 50, SQUARE)
        stop(grader)
        stop(grader)
        with pytest.raises(GraderClosed):
            ray.get(waiting, timeout=PATIENCE_S)
        start()
        until(lambda: _works(grader))


def _works(grader: Any) -> bool:
    try:
        return bool(ray.get(grader.grade.remote(RIGHT, SQUARE), timeout=PATIENCE_S).reward == 1.0)
    except (GraderClosed, ray.exceptions.RayActorError):
        return False


def test_idle_grader_ends(node: Cluster) -> None:
    start(idle_timeout_s=1)
    until(lambda: not ray.util.list_named_actors(all_namespaces=True))
    with pytest.raises(GraderClosed):
        get()


def test_killed_grader_leaves_what_stop_finds(node: Cluster) -> None:
    grader = start()
    ray.kill(grader.actor())
    until(lambda: len(ray.util.list_named_actors(all_namespaces=True)) == 1)
    stop()
    until(lambda: not ray.util.list_named_actors(all_namespaces=True))  # a name goes a moment after its actor


def test_failed_start_ends_the_daemon_that_it_started(node: Cluster) -> None:
    with pytest.raises(ConfigError, match=r"template: expected one of .*, found 'foo'"):
        start(template="foo")
    until(lambda: not ray.util.list_named_actors(all_namespaces=True))  # a name goes a moment after its actor
    assert not [path for path in runtime_dir().iterdir() if path.name != "tests"]


def test_start_that_asks_for_something_else_warns(node: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    with started(1, slots=2) as grader:
        start()
        start(slots=2)
        assert not caplog.records
        start(slots=1, template="other")
        [record] = caplog.records
        assert record.levelname == "WARNING"
        assert "slots (asked for 1, it has 2)" in record.getMessage()
        assert "template (asked for 'other', it has 'python')" in record.getMessage()
        assert "idle_timeout_s" not in record.getMessage()
        assert ray.get(grader.grade.remote(RIGHT, SQUARE)).reward == 1.0


def test_fault_of_the_spec_is_not_the_infrastructures(node: Cluster) -> None:
    spec = {
        "kind": "property",
        "entry": "solve",
        "reference": "def reference(x):\n    raise ValueError('broken')\n",
        "generator": "def generate(rng):\n    return [rng.randrange(9)]\n",
    }
    with started(1) as grader:
        with pytest.raises(CheckerError):
            ray.get(grader.grade.remote(RIGHT, spec), timeout=PATIENCE_S)
        assert stats(grader)["spec_errors"] == {"CheckerError": 1}
        assert stats(grader)["infra_errors"] == {}
