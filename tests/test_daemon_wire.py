"""Every route and every error of the node-local wire, on a real daemon, over a unix socket and TCP."""

import json
import socket
import threading

import pytest
from daemon_harness import Daemon, commands_below


@pytest.fixture(scope="module", params=["unix", "tcp"])
def daemon(request, tmp_path_factory):
    where = {"socket": str(tmp_path_factory.mktemp("d") / "serve.sock")}
    config = where if request.param == "unix" else {"host": "127.0.0.1", "port": 0}
    with Daemon(slots=2, memory_mib=4096, long_s=600, **config) as running:
        yield running
        running.stop()


def test_health_is_true(daemon):
    status, health = daemon.call("GET", "/v1/health")
    assert status == 200
    assert health.keys() >= {
        "status",
        "sessions",
        "running",
        "max_inflight",
        "queued",
        "templates",
        "version",
    }
    assert (health["status"], health["templates"], health["max_inflight"]) == ("ok", ["python", "numpy", "py"], 2)
    assert set(health["features"]) == {
        *("usage", "limits", "stdin", "runner", "seed-pins", "cancel", "exec-batch", "drain", "owner")
    }
    assert health["tier"] in ("landlock", "userns", "full")
    assert (health["egress"], health["pid"]) == ("none", daemon.pid)
    assert {"seccomp", "rlimits", "no-new-privs"} <= set(health["isolation"])
    where = next(iter(daemon.ready.values()))
    assert where in daemon.first_line
    assert f"tier={health['tier']} " in daemon.first_line
    assert "slots=2" in daemon.first_line


def test_a_session_from_birth_to_death(daemon):
    status, made = daemon.call("POST", "/v1/sessions", {"template_id": "py"})
    assert status == 201
    assert made.keys() == {"session_id", "template_id", "fork_time_ms", "create_time_ms", "egress"}
    path = f"/v1/sessions/{made['session_id']}"
    assert daemon.call("POST", f"{path}/exec", {"command": "echo x > f"})[1]["exit_code"] == 0
    assert daemon.call("POST", f"{path}/exec", {"command": "cat f"})[1]["stdout"] == "x\n"
    assert daemon.call("POST", f"{path}/exec", {"command": "sleep 9", "timeout_seconds": 1})[1]["exit_code"] == -1
    assert daemon.call("POST", f"{path}/exec", {"command": "cat f"})[1]["stdout"] == "x\n"
    status, info = daemon.call("GET", path)
    assert (status, info["exec_count"], info["template_id"]) == (200, 4, "py")
    assert info.keys() == {"session_id", "template_id", "age_secs", "idle_secs", "exec_count"}
    assert daemon.call("GET", "/v1/sessions")[1][0]["session_id"] == made["session_id"]
    assert daemon.call("DELETE", path) == (200, {"deleted": True, "session_id": made["session_id"]})
    assert daemon.call("DELETE", path) == (404, {"deleted": False, "session_id": made["session_id"]})
    status, answer = daemon.call("POST", f"{path}/exec", {"command": "cat f"})
    assert (status, answer["error_code"]) == (410, "session_gone")
    assert daemon.call("GET", "/v1/sessions")[1] == []


def test_execs_of_a_session_run_one_after_the_other(daemon):
    name = daemon.call("POST", "/v1/sessions", {"template_id": "py"})[1]["session_id"]
    path = f"/v1/sessions/{name}/exec"
    command = "echo a >> log; sleep 0.1; echo b >> log"
    threads = [threading.Thread(target=daemon.call, args=("POST", path, {"command": command})) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert daemon.call("POST", path, {"command": "cat log"})[1]["stdout"].split() == ["a", "b"] * 3
    daemon.call("DELETE", f"/v1/sessions/{name}")


BAD = [
    ({"template_id": "py"}, 400, "bad_request", "command"),
    ({"command": "x"}, 400, "template_id_required", "template_id"),
    ({"template_id": 7, "command": "x"}, 400, "bad_request", "template_id"),
    ({"template_id": "nope", "command": "x"}, 404, "no_template", "nope"),
    ({"template_id": "py", "command": 3}, 400, "bad_request", "command"),
    ({"template_id": "py", "command": "a\0b"}, 400, "bad_request", "command"),
    ({"template_id": "py", "code": ["x"]}, 400, "bad_request", "code"),
    ({"template_id": "py", "commands": "ls"}, 400, "bad_request", "commands"),
    ({"template_id": "py", "commands": [["ls", 1]]}, 400, "bad_request", "commands"),
    ({"template_id": "py", "command": "x", "seed": "xyz"}, 400, "invalid_seed", "seed"),
    ({"template_id": "py", "command": "x", "seed": 5}, 400, "invalid_seed", "seed"),
    ({"template_id": "py", "command": "x", "timeout_seconds": 0}, 400, "bad_request", "timeout_seconds"),
    ({"template_id": "py", "command": "x", "timeout_seconds": 3601}, 400, "bad_request", "timeout_seconds"),
    ({"template_id": "py", "command": "x", "timeout_seconds": True}, 400, "bad_request", "timeout_seconds"),
    ({"template_id": "py", "command": "x", "timeout_seconds": "9"}, 400, "bad_request", "timeout_seconds"),
    ({"template_id": "py", "command": "x", "files": {}}, 400, "bad_request", "files"),
    ({"template_id": "py", "command": "x", "files": [{"content": ""}]}, 400, "bad_request", "files[0].path"),
    (
        {"template_id": "py", "command": "x", "files": [{"path": "a", "content": 1}]},
        400,
        "bad_request",
        ".content",
    ),
    ({"template_id": "py", "command": "x", "limits": {"memory": 1}}, 400, "bad_request", "memory"),
    (
        {"template_id": "py", "command": "x", "limits": {"memory_mib": -1}},
        400,
        "bad_request",
        "limits.memory_mib",
    ),
    ({"template_id": "py", "command": "x", "limits": {"files": 1.5}}, 400, "bad_request", "limits.files"),
    (
        {"template_id": "py", "command": "x", "limits": {"memory_mib": 5000}},
        400,
        "bad_request",
        "limits.memory_mib",
    ),
    ({"template_id": "py", "command": "x", "stdin_b64": "?"}, 400, "bad_request", "stdin_b64"),
    ({"template_id": "py", "command": "x", "stdin_b64": 1}, 400, "bad_request", "stdin_b64"),
    ({"template_id": "py", "command": "x", "id": "a/b"}, 400, "bad_request", "id"),
    ({"template_id": "py", "command": "x", "owner": ""}, 400, "bad_request", "owner"),
    (
        {"template_id": "py", "command": "x", "owner": "a", "ttl_seconds": 0},
        400,
        "bad_request",
        "ttl_seconds",
    ),
    ({"template_id": "py", "command": "x", "egress": {"mode": "open"}}, 400, "bad_request", "egress"),
    ([1], 400, "bad_request", "body"),
]


@pytest.mark.parametrize(("body", "status", "code", "named"), BAD)
def test_bad_fields_are_named(daemon, body, status, code, named):
    found, answer = daemon.call("POST", "/v1/exec", body)
    assert (found, answer["error_code"]) == (status, code)
    assert named in answer["error"]
    assert "\n" not in answer["error"]


def test_the_egress_in_force_may_be_named(daemon):
    assert daemon.run(command="true", egress={"mode": "none"})["exit_code"] == 0


def test_body_that_is_no_json(daemon):
    for body in (b"{", b"\xff\xfe", b"[" * 100_000):
        status, answer = daemon.call("POST", "/v1/exec", body)
        assert (status, answer["error_code"]) == (400, "bad_request")


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/", 404, "not_found"),
        ("GET", "/v1/exec", 404, "not_found"),
        ("PUT", "/v1/sessions", 404, "not_found"),
        ("GET", "/v1/sessions/sess_x", 404, "no_such_session"),
        ("POST", "/v1/sessions/sess_x/exec", 404, "no_such_session"),
        ("DELETE", "/v1/execs/x", 404, "no_such_exec"),
    ],
)
def test_unknown_things(daemon, method, path, status, code):
    found, answer = daemon.call(method, path, {"command": "true"} if method == "POST" else None)
    assert (found, answer["error_code"]) == (status, code)


def test_running_exec_is_cancelled_by_its_id(daemon):
    running = daemon.background(command="sleep 60", id="mine")
    daemon.until(lambda health: health["running"] == 1, "running")
    status, answer = daemon.call("POST", "/v1/exec", {"template_id": "py", "command": "true", "id": "mine"})
    assert (status, answer["error_code"]) == (400, "bad_request")
    assert daemon.call("DELETE", "/v1/execs/mine") == (200, {"cancelled": True, "id": "mine"})
    running.join()
    assert running.answer[0] == 499
    assert running.answer[1]["error_code"] == "cancelled"
    assert daemon.call("DELETE", "/v1/execs/mine")[0] == 404
    assert commands_below(daemon.pid) == set()


def test_closing_the_connection_cancels(daemon):
    body = json.dumps({"template_id": "py", "command": "sleep 60"}).encode()
    with daemon.raw() as raw:
        head = f"POST /v1/exec HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        raw.sendall(head.encode() + body)
        daemon.until(lambda health: health["running"] == 1, "running")
        raw.shutdown(socket.SHUT_RDWR)
    daemon.until(lambda health: health["running"] == 0, "cancelled", seconds=5)
    assert commands_below(daemon.pid) == set()


def test_deleting_a_session_ends_its_exec(daemon):
    name = daemon.call("POST", "/v1/sessions", {"template_id": "py"})[1]["session_id"]
    answers = []
    path = f"/v1/sessions/{name}"
    work = threading.Thread(target=lambda: answers.append(daemon.call("POST", f"{path}/exec", {"command": "sleep 60"})))
    work.start()
    daemon.until(lambda health: health["running"] == 1, "running")
    assert daemon.call("DELETE", path)[1]["deleted"]
    work.join()
    assert (answers[0][0], answers[0][1]["error_code"]) == (410, "session_gone")


def test_full_queue_is_told_at_once_and_queued_execs_run_or_are_cancelled(daemon):
    busy = [daemon.background(command="sleep 60", id=f"busy{i}") for i in range(2)]
    daemon.until(lambda health: health["running"] == 2, "full")
    waiting = [daemon.background(command="echo ran", id=f"wait{i}") for i in range(48)]
    daemon.until(lambda health: health["queued"] == 48, "queued")
    status, answer = daemon.call("POST", "/v1/exec", {"template_id": "py", "command": "true"})
    assert (status, answer["error_code"]) == (503, "at_capacity")
    assert daemon.call("DELETE", "/v1/execs/wait0")[0] == 200
    waiting[0].join()
    assert waiting[0].answer[0] == 499
    for i in range(2):
        daemon.call("DELETE", f"/v1/execs/busy{i}")
    for thread in busy + waiting:
        thread.join()
    assert [thread.answer[1]["stdout"] for thread in waiting[1:]] == ["ran\n"] * 47


def test_memory_is_admitted_too(daemon):
    busy = daemon.background(command="sleep 60", id="big", limits={"memory_mib": 3500})
    daemon.until(lambda health: health["running"] == 1, "running")
    second = daemon.background(command="true", limits={"memory_mib": 1000})
    daemon.until(lambda health: health["queued"] == 1, "queued")
    daemon.call("DELETE", "/v1/execs/big")
    busy.join()
    second.join()
    assert second.answer[1]["exit_code"] == 0


def test_an_owner_leaves_and_its_sessions_go(daemon):
    body = {"template_id": "py", "owner": "me", "ttl_seconds": 60}
    kept = daemon.call("POST", "/v1/sessions", {"template_id": "py"})[1]["session_id"]
    name = daemon.call("POST", "/v1/sessions", body)[1]["session_id"]
    assert daemon.call("POST", "/v1/owners/me", {"ttl_seconds": 30}) == (
        200,
        {"owner": "me", "ttl_seconds": 30},
    )
    assert daemon.call("DELETE", "/v1/owners/me") == (200, {"owner": "me", "deleted": True, "sessions": 1})
    assert daemon.call("GET", f"/v1/sessions/{name}")[1]["error_code"] == "no_such_session"
    assert daemon.call("GET", f"/v1/sessions/{kept}")[0] == 200
    daemon.call("DELETE", f"/v1/sessions/{kept}")


def test_a_silent_owner_loses_its_sessions(daemon):
    body = {"template_id": "py", "owner": "brief", "ttl_seconds": 0.1}
    assert daemon.call("POST", "/v1/sessions", body)[0] == 201
    daemon.until(lambda health: health["sessions"] == 0, "reaped")
