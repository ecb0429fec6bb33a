"""Birth and death of the daemon: addresses, drain, linger, crash, and nothing left behind."""

import contextlib
import fcntl
import os
import re
import signal
import socket
import subprocess
import tempfile
import time
import uuid
from pathlib import Path

import pytest
from daemon_harness import Daemon, processes_with

from collimate_ray.daemon import DaemonConfig, serve
from collimate_ray.errors import ConfigError
from collimate_ray.jail.process import child_pids


def gone(pids, seconds=5):
    """Wait until none of the processes lives."""
    end = time.monotonic() + seconds
    while any(os.path.exists(f"/proc/{pid}") for pid in pids):
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def test_private_directory_and_nothing_left_after_the_drain(tmp_path):
    path = tmp_path / "own" / "serve.sock"
    with Daemon(socket=str(path)) as daemon:
        assert oct(path.parent.stat().st_mode)[-3:] == "700"
        assert oct(path.stat().st_mode)[-3:] == "600"
        assert daemon.run(command="echo x > /tmp/x; echo x > f; echo hi")["stdout"] == "hi\n"
        daemon.call("POST", "/v1/sessions", {"template_id": "py"})
        daemon.signal()
        assert daemon.wait() == 0
    assert list(tmp_path.iterdir()) == []


def test_drain_finishes_what_runs_and_refuses_the_new(tmp_path):
    with Daemon(socket=str(tmp_path / "serve.sock"), slots=1, long_s=600) as daemon:
        name = daemon.call("POST", "/v1/sessions", {"template_id": "py"})[1]["session_id"]
        tag = f"{uuid.uuid4()}"
        running = daemon.background(command=f"until [ -e go ]; do sleep 0.05; done; echo whole; : {tag}")
        daemon.until(lambda health: health["running"] == 1 and processes_with(tag), "running")
        waiting = daemon.background(command="echo never")
        daemon.until(lambda health: health["queued"] == 1, "queued")
        daemon.signal()
        health = daemon.until(lambda health: health["status"] == "draining", "draining")
        assert health["running"] == 1
        waiting.join()
        assert waiting.answer[1]["error_code"] == "draining"
        for path, body in (
            ("/v1/exec", {"template_id": "py", "command": "true"}),
            ("/v1/sessions", {"template_id": "py"}),
            (f"/v1/sessions/{name}/exec", {"command": "true"}),
        ):
            status, answer = daemon.call("POST", path, body)
            assert (status, answer["error_code"]) == (503, "draining")
        Path(f"/proc/{processes_with(tag)[0]}/cwd/go").touch()
        running.join()
        assert running.answer[0] == 200
        assert running.answer[1]["stdout"] == "whole\n"
        assert daemon.wait() == 0


@pytest.mark.parametrize("signals", [[signal.SIGINT], [signal.SIGTERM, signal.SIGTERM]])
def test_interrupt_kills_what_runs_and_answers_nothing(tmp_path, signals):
    tag = f"{uuid.uuid4()}"
    with Daemon(socket=str(tmp_path / "serve.sock")) as daemon:
        running = daemon.background(command=f"setsid sh -c 'sleep 60; : {tag}' & sleep 60")
        daemon.until(lambda health: health["running"] == 1, "running")
        for number in signals:
            daemon.signal(number)
            if number is signal.SIGTERM and daemon.process.poll() is None:
                with contextlib.suppress(OSError):
                    daemon.until(lambda health: health["status"] == "draining", "draining")
        assert daemon.wait() == 130
        running.join()
        assert running.answer is None
    assert processes_with(tag) == []
    assert list(tmp_path.iterdir()) == []


def test_idle_sessions_are_reaped(tmp_path):
    with Daemon(socket=str(tmp_path / "serve.sock"), idle_s=2) as daemon:
        name = daemon.call("POST", "/v1/sessions", {"template_id": "py"})[1]["session_id"]
        assert daemon.call("POST", f"/v1/sessions/{name}/exec", {"command": "sleep 2.5"})[0] == 200
        daemon.until(lambda health: health["sessions"] == 0, "reaped")
        assert daemon.call("GET", f"/v1/sessions/{name}")[1]["error_code"] == "no_such_session"
        daemon.stop()


def test_linger_ends_it_but_not_while_it_is_needed(tmp_path):
    with Daemon(socket=str(tmp_path / "serve.sock"), linger_s=2) as daemon:
        assert daemon.run(command="sleep 2.5; echo hi")["stdout"] == "hi\n"
        daemon.call("POST", "/v1/owners/me", {"ttl_seconds": 3.0})
        leased = time.monotonic()
        assert daemon.wait(20) == 0
        assert time.monotonic() - leased > 2.9
    assert list(tmp_path.iterdir()) == []


def test_crash_kills_the_execs_and_the_next_life_sweeps(tmp_path):
    tag = f"{uuid.uuid4()}"
    path = tmp_path / "serve.sock"
    with Daemon(socket=str(path)) as daemon:
        daemon.call("POST", "/v1/sessions", {"template_id": "py"})
        running = daemon.background(command=f"setsid sh -c 'sleep 60; : {tag}' >/dev/null 2>&1 & sleep 60")
        daemon.until(lambda health: health["running"] == 1 and processes_with(tag), "running")
        mains = child_pids(daemon.pid)
        daemon.signal(signal.SIGKILL)
        daemon.wait()
        running.join()
        assert mains
        assert gone(mains)
    assert os.listdir(tmp_path / "serve.sock.d")
    with Daemon(socket=str(path)) as again:
        left = processes_with(tag)
        assert gone(left)
        assert os.listdir(tmp_path / "serve.sock.d" / "w") == []
        assert again.run(command="echo hi")["stdout"] == "hi\n"
        again.stop()
    assert list(tmp_path.iterdir()) == []


def refused(**config):
    with pytest.raises(RuntimeError) as caught:
        Daemon(**config)
    text = str(caught.value)
    assert re.match(r"ConfigError: .*\n\Z", text), text
    return text


def test_second_daemon_on_an_address_is_refused(tmp_path):
    path = str(tmp_path / "serve.sock")
    with Daemon(socket=path) as daemon:
        assert "already served" in refused(socket=path)
        assert daemon.run(command="echo hi")["stdout"] == "hi\n"
        daemon.stop()
    with Daemon(host="127.0.0.1", port=0) as daemon:
        port = int(daemon.ready["url"].rpartition(":")[2])
        assert "can't be bound" in refused(host="127.0.0.1", port=port)
        daemon.stop()


def test_bad_addresses_are_one_clear_line(tmp_path):
    (tmp_path / "file").write_text("mine")
    wide = tmp_path / "wide"
    wide.mkdir(mode=0o755)
    for config, expected in (
        ({"socket": str(tmp_path / ("x" * 120))}, "at most 107 bytes"),
        ({"host": "0.0.0.0", "port": 0}, "loopback"),
        ({"host": "127.0.0.1", "port": 70000}, "0 to 65535"),
        ({"socket": str(tmp_path / "s"), "slots": 0}, "slots: expected at least 1, found 0"),
        ({"socket": str(tmp_path / "s"), "linger_s": 0}, "linger_s"),
        ({}, "found both or neither"),
        ({"socket": str(tmp_path / "file")}, "something else"),
        ({"socket": str(wide / "s")}, "mode 0755"),
    ):
        with pytest.raises(ConfigError, match=expected) as caught:
            serve(DaemonConfig(**config))
        assert "\n" not in str(caught.value)
    assert (tmp_path / "file").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "wide"]
    assert list(wide.iterdir()) == []


def test_stale_socket_is_replaced(tmp_path):
    path = tmp_path / "serve.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    with Daemon(socket=str(path)) as daemon:
        assert daemon.run(command="echo hi")["stdout"] == "hi\n"
        daemon.stop()


def descriptors(pid):
    """What a process has open, but for the files of cgroups, which stay open for the next session of their slot."""
    found = []
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):
            found.append(os.readlink(f"/proc/{pid}/fd/{name}"))
    return [link for link in found if not link.startswith("/sys/fs/cgroup")]


@pytest.mark.skipif(os.getuid() != 0, reason="only root sees the descriptors of a non-dumpable process")
def test_descriptors_do_not_leak_and_their_lack_is_no_death(tmp_path):
    with Daemon(socket=str(tmp_path / "serve.sock"), slots=2) as daemon:
        daemon.run(command="true")

        def full(health):
            details = health["template_details"]["python"]
            zygotes = min(2, len(os.sched_getaffinity(0)))
            return details["parked"] == details["to_park"] >= 2 and details["zygotes"] == zygotes

        daemon.until(full, "all sessions are parked")
        before = descriptors(daemon.pid)
        for _ in range(5):
            daemon.run(command="true", stdin_b64="eA==")
            daemon.call("POST", "/v1/exec", b"{")
        daemon.until(
            lambda health: full(health) and len(descriptors(daemon.pid)) <= len(before), "descriptors are back"
        )
        most = len(os.listdir(f"/proc/{daemon.pid}/fd")) + 2
        subprocess.run(["prlimit", f"--pid={daemon.pid}", f"--nofile={most}:"], check=True)
        status, answer = daemon.call("POST", "/v1/exec", {"template_id": "py", "command": "true"})
        assert (status, answer["error_code"]) == (503, "session_bringup_failed")
        subprocess.run(["prlimit", f"--pid={daemon.pid}", "--nofile=1000:"], check=True)
        assert daemon.run(command="echo hi")["stdout"] == "hi\n"
        daemon.stop()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be fenced in by mounts")
def test_isolation_does_not_depend_on_where_the_socket_is(tmp_path):
    with tempfile.TemporaryDirectory(dir="/run") as elsewhere:
        found = []
        for top in (tmp_path, elsewhere):
            with Daemon(socket=f"{top}/d/serve.sock") as daemon:
                found.append(daemon.call("GET", "/v1/health")[1]["isolation"])
        assert found[0] == found[1]


def test_nobody_needs_to_read_its_log(tmp_path):
    with Daemon(socket=str(tmp_path / "serve.sock"), verbose=True) as daemon:
        log = daemon.process.stderr.fileno()
        fcntl.fcntl(log, fcntl.F_SETPIPE_SZ, 4096)
        for _ in range(60):
            assert daemon.run(command="true")["status"] == "ok"
        lines = os.read(log, 1 << 16).decode().splitlines()
        assert len(lines) < 60
        assert all(" event=exec.ended id=" in line and " status=ok " in line for line in lines), lines
        assert daemon.run(command="true")["status"] == "ok"
        assert " event=exec.ended id=" in os.read(log, 1 << 16).decode()
        daemon.stop()
