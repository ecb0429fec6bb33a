"""Whole commands on real clusters: results, summaries, exit codes, and that nothing is left whatever ends them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from cli_tools import (
    LOOP,
    PATIENCE_S,
    RIGHT,
    SPEC,
    WRONG,
    cluster_directories,
    command,
    read_lines,
    row,
    run,
    write_lines,
)

from collimate_ray.config import runtime_dir
from collimate_ray.sandbox.embedded import Daemon, stop_daemon

SEED = "0f" * 32
START = "collimate-ray: starting a local Ray cluster of 2 nodes to grade 2 groups"


@pytest.fixture(autouse=True)
def no_cluster_stays(no_leftovers: object) -> Iterator[None]:
    yield
    assert cluster_directories() == []


def test_grade_writes_a_line_for_each_group(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    rows = [
        row("plain"),
        row("seeded", seed=SEED),
        row("limited", spec={**SPEC, "limits": {"time_s": 60}}, completions=[LOOP], limits={"time_s": 1}),
        row(
            "broken",
            spec={
                "kind": "property",
                "reference": "def reference(x):\n    return x",
                "generator": "def generate(rng):\n    return [1 / 0]",
            },
        ),
    ]
    done = run("grade", "-", "--out", out, "--nodes", 2, "--json", stdin="\n".join(map(json.dumps, rows)))
    assert done.returncode == 1, done.stderr
    groups = {group["id"]: group for group in read_lines(out)}
    assert groups["plain"]["rewards"] == groups["seeded"]["rewards"] == [1.0, 0.0]
    assert [result["seed"] for result in groups["seeded"]["results"]] == [SEED, SEED]
    assert groups["limited"]["results"][0]["verdict"] == "timeout"
    assert groups["broken"]["valid"] == [False, False]
    assert groups["broken"]["results"][0]["error"] == "CheckerError"
    summary = json.loads(done.stdout)
    assert (summary["groups"], summary["grades"], summary["exit_code"], summary["out"]) == (4, 7, 1, str(out))
    assert summary["verdicts"] == {"passed": 2, "failed": 2, "timeout": 1}
    assert (summary["infra_errors"], summary["spec_errors"]) == ({}, {"CheckerError": 2})
    [reason, last] = done.stderr.splitlines()
    assert reason.startswith("collimate-ray: 'broken': no verdict: CheckerError: ")
    assert last.startswith("collimate-ray: graded 7 of 7, ")


def test_demo_gives_each_completion_its_reward(tmp_path: Path) -> None:
    done = run("demo", "--out", tmp_path / "demo", "--json")
    assert done.returncode == 0, done.stderr
    expected = json.loads((Path(__file__).parent / "data" / "demo_rewards.json").read_text())
    found = {group["id"]: group["rewards"] for group in read_lines(tmp_path / "demo" / "results.jsonl")}
    assert found.keys() == expected.keys()
    wrong = {name: found[name] for name in expected if found[name] != pytest.approx(expected[name], abs=1e-5)}
    assert wrong == {}
    summary = json.loads(done.stdout)
    assert (len(summary["nodes"]), summary["infra_errors"]) == (3, {})


#: A cluster that is there already; in a process of its own, since Ray keeps descriptors in whichever starts one.
CLUSTER = """
import sys
from ray.cluster_utils import Cluster
head = {"num_cpus": 1, "include_dashboard": False, "object_store_memory": 80 << 20}
cluster = Cluster(initialize_head=True, shutdown_at_exit=False, head_node_args=head)
print(cluster.address, flush=True)
sys.stdin.read()
cluster.shutdown()
"""


@pytest.fixture
def cluster_address() -> Iterator[str]:
    python = [sys.executable, "-W", "ignore", "-c", CLUSTER]
    with subprocess.Popen(python, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        yield process.stdout.readline().strip()
        process.stdin.close()
        assert process.wait(PATIENCE_S) == 0


def test_join_a_running_cluster(cluster_address: str, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "in.jsonl", row())
    for _ in range(2):
        done = run("grade", path, "--out", tmp_path / "out", "--address", cluster_address)
        assert done.returncode == 0, done.stderr
        assert read_lines(tmp_path / "out")[0]["rewards"] == [1.0, 0.0]
        assert "PASSED" in done.stdout
        start = done.stderr.splitlines()[0]
        assert start == f"collimate-ray: joining the cluster at {cluster_address} to grade 1 group"


def test_a_cluster_that_wants_a_token(cluster_address: str, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "in.jsonl", row())
    line = [
        "env",
        "-u",
        "RAY_AUTH_MODE",
        *command("grade", path, "--out", tmp_path / "out", "--address", cluster_address),
    ]
    done = subprocess.run(line, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 3
    [_, problem] = done.stderr.splitlines()  # and no line of Ray
    assert problem.startswith(f"collimate-ray: error: --address: no Ray cluster at {cluster_address}: ")
    assert "InvalidAuthToken" in problem
    assert "if the cluster uses token authentication, set RAY_AUTH_MODE=token (and RAY_AUTH_TOKEN_PATH)" in problem


@pytest.mark.parametrize("address", ["127.0.0.1:1", "nowhere.invalid:6379"])
def test_no_cluster_to_join(address: str, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "in.jsonl", row())
    done = run("grade", path, "--out", tmp_path / "out", "--address", address)
    assert done.returncode == 3
    [_, line] = done.stderr.splitlines()
    assert line.startswith(f"collimate-ray: error: --address: no Ray cluster at {address}: ")
    assert not (tmp_path / "out").exists()


@contextmanager
def running_grade(tmp_path: Path, *completions: str) -> Iterator[subprocess.Popen[str]]:
    rows = [row("quick", completions=[RIGHT, WRONG]), row("slow", completions=list(completions))]
    path = write_lines(tmp_path / "in.jsonl", *rows)
    arguments = command("grade", path, "--out", tmp_path / "out", "--nodes", 2)
    with subprocess.Popen(
        arguments, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def wait_for(process: subprocess.Popen[str], happened: object) -> None:
    """Wait until ``happened()`` is true; only the file system tells what another process has done."""
    assert callable(happened)
    end = time.monotonic() + PATIENCE_S
    while not happened():
        assert process.poll() is None, process.stderr and process.stderr.read()
        assert time.monotonic() < end
        time.sleep(0.01)


def test_ctrl_c_while_grading(tmp_path: Path) -> None:
    with running_grade(tmp_path, *[LOOP] * 8) as process:
        wait_for(process, lambda: (tmp_path / "out").exists() and (tmp_path / "out").stat().st_size > 0)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        assert process.stderr is not None
        lines = process.stderr.read().splitlines()
        assert process.wait(PATIENCE_S) == 130
    assert lines == [START, f"collimate-ray: interrupted: 1 of 2 groups are in {tmp_path / 'out'}"]
    assert [group["id"] for group in read_lines(tmp_path / "out")] == ["quick"]


@pytest.mark.parametrize("sign", [".", "ray", "ray/session_latest/sockets/plasma_store"])
def test_a_request_to_stop_while_the_cluster_starts(sign: str, tmp_path: Path) -> None:
    with running_grade(tmp_path, RIGHT) as process:
        wait_for(process, lambda: any((directory / sign).exists() for directory in cluster_directories()))
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) == 130
        assert process.stderr is not None
        [start, line] = process.stderr.read().splitlines()
    assert start == START
    assert line.startswith("collimate-ray: interrupted: 0 of 2 groups")
    assert not (tmp_path / "out").exists()


def test_a_command_that_is_killed_leaves_no_cluster(tmp_path: Path) -> None:
    with running_grade(tmp_path, *[LOOP] * 4) as process:
        sockets = runtime_dir().glob
        wait_for(process, lambda: len(list(sockets("*/serve.sock"))) == 2 and not list(sockets("*.lock")))
        below = commands_below(process.pid)
        process.kill()
    daemons = {pid: line.split(b"\0") for pid, line in below.items() if b"\0serve\0" in line}
    wait_until_gone(below.keys() - daemons.keys())
    assert daemons
    for pid, words in daemons.items():  # which would end by themselves, a minute after their last work
        stop_daemon(Daemon(words[words.index(b"--socket") + 1].decode(), pid, True))


def commands_below(pid: int) -> dict[int, bytes]:
    """Command lines of all processes below one, by pid, those below daemons left out."""
    found = {}
    for child in map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()):
        found[child] = Path(f"/proc/{child}/cmdline").read_bytes()
        if b"\0serve\0" not in found[child]:  # what a daemon has below it is its own affair
            found.update(commands_below(child))
    return found


def wait_until_gone(pids: set[int]) -> None:
    end = time.monotonic() + PATIENCE_S
    while left := {pid for pid in pids if is_running(pid)}:
        assert time.monotonic() < end, left
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "XZ"
    except OSError:
        return False


def test_serve_says_where_and_ends_in_order(tmp_path: Path) -> None:
    socket = Path(tempfile.mkdtemp(dir=tempfile.gettempdir(), prefix="s")) / "d" / "serve.sock"
    with subprocess.Popen(
        command("serve", "--socket", socket, "--json"), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline()) == {"socket": str(socket), "pid": process.pid}
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0
    assert not socket.exists()
    os.rmdir(socket.parent.parent)
