"""Many execs in one request, and what only operators may ask for: on a server with a script, and on a real daemon."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from scripted import Action, Received, ScriptedServer, answer, refused

from collimate_ray.errors import (
    CollimateRayError,
    ConfigError,
    InfraError,
    SandboxAtCapacity,
    SandboxDraining,
    SandboxUnavailable,
    SessionLost,
    WireError,
)
from collimate_ray.sandbox import SandboxClient
from collimate_ray.sandbox.wire import MAX_BATCH, STATUS_OF

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/x-ndjson\r\nTransfer-Encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"
EXECS = [{"code": str(number)} for number in range(3)]


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def done(index: int, **fields: Any) -> bytes:
    line = {"index": index, "http_status": 200, "stdout": f"{index}\n", "exit_code": 0, **fields}
    return chunk(json.dumps(line).encode() + b"\n")


def failed(index: int, code: str) -> bytes:
    line = {"index": index, "http_status": STATUS_OF[code], "error": f"told: {code}", "error_code": code}
    return chunk(json.dumps(line).encode() + b"\n")


def then_closes(data: bytes) -> Action:
    def act(_request: Received, connection: socket.socket) -> bool:
        connection.sendall(data)
        return False

    return act


@pytest.fixture(params=["tcp", "unix"])
def socket_path(request: pytest.FixtureRequest, tmp_path: Path) -> Path | None:
    return tmp_path / "s" if request.param == "unix" else None


@pytest.fixture
def client(daemon: Any) -> Iterator[SandboxClient]:
    with SandboxClient(unix_socket=daemon.socket) as made:
        yield made


def until(condition: Any) -> None:
    """Wait for another process; the test's own time-out ends it."""
    while not condition():
        time.sleep(0.02)


def test_outcomes_come_as_they_end_and_the_connection_is_kept(socket_path: Path | None) -> None:
    script = [HEAD + done(2) + done(0, seed="ab") + done(1) + END]
    with ScriptedServer(socket_path, script) as server, SandboxClient(**server.where) as client:
        for _ in range(2):
            found = list(client.exec_batch("python", EXECS))
            assert [index for index, _ in found] == [2, 0, 1]
            assert found[1][1] == {"stdout": "0\n", "exit_code": 0, "seed": "ab"}
        assert server.connections == 1
        assert server.requests[0].path == "/v1/exec/batch"


def test_bodies_hold_only_what_was_given() -> None:
    execs = [{"command": "true"}, {"code": "1", "stdin": b"\xff", "exec_id": "e", "seed": "0f" * 32}]
    with ScriptedServer(None, [HEAD + END]) as server, SandboxClient(**server.where) as client:
        list(client.exec_batch("python", execs))
        list(client.exec_batch("python", execs[:1], owner="o", deadline=time.monotonic() + 1000))
        plain, full = (request.json for request in server.requests)
    assert plain == {
        "template_id": "python",
        "execs": [
            {"command": "true", "timeout_seconds": 30},
            {"code": "1", "timeout_seconds": 30, "seed": "0f" * 32, "stdin_b64": "/w==", "id": "e"},
        ],
    }
    assert 900 < full.pop("deadline_seconds") <= 1000
    assert full == {"template_id": "python", "execs": [{"command": "true", "timeout_seconds": 30}], "owner": "o"}


@pytest.mark.parametrize(
    ("code", "kind", "admitted"),
    [
        ("zygote_lost", SandboxUnavailable, True),
        ("deadline", SandboxUnavailable, True),
        ("cancelled", SandboxUnavailable, True),
        ("internal", SandboxUnavailable, True),
        ("session_gone", SessionLost, True),
        ("no_such_session", SessionLost, False),
        ("at_capacity", SandboxAtCapacity, False),
        ("session_bringup_failed", SandboxAtCapacity, False),
        ("draining", SandboxDraining, False),
    ],
)
def test_infra_error_of_one_exec_is_its_own(code: str, kind: type[InfraError], admitted: bool) -> None:
    script = [HEAD + failed(1, code) + done(0) + done(2) + END]
    with ScriptedServer(None, script) as server, SandboxClient(**server.where) as client:
        found = dict(client.exec_batch("python", EXECS))
        assert len(server.requests) == 1
    error = found[1]
    assert type(error) is kind
    assert (error.admitted, error.retriable) == (admitted, True)
    assert f"{STATUS_OF[code]} {code}: told: {code}" in str(error)
    assert isinstance(found[0], dict)
    assert isinstance(found[2], dict)


@pytest.mark.parametrize("code", ["bad_request", "invalid_seed"])
def test_mistake_in_one_exec_is_its_own(code: str) -> None:
    script = [HEAD + failed(0, code) + done(2) + done(1) + END]
    with ScriptedServer(None, script) as server, SandboxClient(**server.where) as client:
        found = dict(client.exec_batch("python", EXECS))
    assert type(found[0]) is ConfigError
    assert isinstance(found[1], dict)


@pytest.mark.parametrize(
    "fields", [{"stdout": None}, {"exit_code": "0"}, {"http_status": None}, {"http_status": "200"}]
)
def test_line_of_a_wrong_shape_is_no_answer(fields: dict[str, Any]) -> None:
    script = [HEAD + done(1, **fields) + done(0) + done(2) + END]
    with ScriptedServer(None, script) as server, SandboxClient(**server.where) as client:
        found = dict(client.exec_batch("python", EXECS))
    assert {index: type(outcome) for index, outcome in found.items()} == {0: dict, 1: WireError, 2: dict}


@pytest.mark.parametrize(
    ("action", "kind"),
    [
        (HEAD + done(1) + END, SandboxUnavailable),  # it ends in order and is silent on two
        (then_closes(HEAD + done(1)), WireError),
        (then_closes(HEAD + done(1) + done(0)[:-20]), WireError),
        (then_closes(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + done(1).split(b"\r\n")[1]), SandboxUnavailable),
        (HEAD + done(1) + done(1) + done(0) + END, WireError),
        (HEAD + done(1) + done(3) + done(0) + END, WireError),
        (HEAD + done(1) + done(True) + done(0) + END, WireError),
        (HEAD + done(1) + chunk(b"not JSON\n") + done(0) + END, WireError),
        (HEAD + done(1) + chunk(b"[]\n") + done(0) + END, WireError),
    ],
)
def test_execs_without_a_line_may_have_run(
    socket_path: Path | None, action: Action, kind: type[CollimateRayError]
) -> None:
    with ScriptedServer(socket_path, [action]) as server, SandboxClient(**server.where) as client:
        found = list(client.exec_batch("python", EXECS))
        assert len(server.requests) == 1
    assert [index for index, _ in found] == [1, 0, 2]
    assert isinstance(found[0][1], dict)
    assert [(type(outcome), outcome.admitted) for _, outcome in found[1:]] == [(kind, True)] * 2


@pytest.mark.parametrize(
    ("action", "kind", "sent"),
    [
        (refused("draining"), SandboxDraining, 4),
        (refused("at_capacity"), SandboxAtCapacity, 4),
        (refused("no_template"), ConfigError, 1),
        (refused("not_found"), WireError, 1),  # a daemon without the feature
        (answer({}, 500), SandboxUnavailable, 1),
    ],
)
def test_refused_batch_is_an_error_of_all(action: Action, kind: type[Exception], sent: int) -> None:
    with ScriptedServer(None, [action]) as server, SandboxClient(**server.where, backoff=0.001) as client:
        with pytest.raises(kind):
            next(iter(client.exec_batch("python", EXECS)))
        assert len([request for request in server.requests if request.method == "POST"]) == sent


def test_refused_batch_is_sent_again_until_it_is_taken() -> None:
    script = [refused("draining"), HEAD + done(0) + done(1) + done(2) + END]
    with ScriptedServer(None, script) as server, SandboxClient(**server.where, backoff=0.001) as client:
        assert len(list(client.exec_batch("python", EXECS))) == 3
        assert server.requests[0].json == server.requests[1].json


def holding(data: bytes, server: list[ScriptedServer]) -> Action:
    def act(_request: Received, connection: socket.socket) -> bool:
        connection.sendall(data)
        server[0].stopping.wait()
        return False

    return act


def test_deadline_ends_the_wait_for_lines() -> None:
    held: list[ScriptedServer] = []
    with ScriptedServer(None, [holding(HEAD + done(0), held)]) as server, SandboxClient(**server.where) as client:
        held.append(server)
        began = time.monotonic()
        found = dict(client.exec_batch("python", EXECS, deadline=began + 0.3))
        assert 0.3 <= time.monotonic() - began < 60  # without the deadline: 120 s
        assert [type(found[index]) for index in range(3)] == [dict, SandboxUnavailable, SandboxUnavailable]
        server.stopping.set()


def test_deadline_that_passed_sends_nothing() -> None:
    with ScriptedServer(None, [HEAD + END]) as server, SandboxClient(**server.where) as client:
        with pytest.raises(SandboxUnavailable) as caught:
            list(client.exec_batch("python", EXECS, deadline=time.monotonic() - 1))
        assert caught.value.admitted is False
        assert server.requests == []


@pytest.mark.parametrize(
    ("execs", "words"),
    [
        ([], "execs: expected 1 to 256 of them, found 0"),
        ([{"code": "1"}] * (MAX_BATCH + 1), "found 257"),
        ([{"code": "1"}, {}], "one of command, commands or code"),
        ([{"code": "1", "timeout_seconds": 0}], "timeout_seconds: expected a whole number"),
    ],
)
def test_wrong_batch_is_told_before_anything_is_sent(execs: list[dict[str, Any]], words: str) -> None:
    with SandboxClient("http://127.0.0.1:9") as client, pytest.raises(ConfigError, match=words):
        list(client.exec_batch("python", execs))


# ---- on a real daemon --------------------------------------------------------------------------------------------


def test_batch_larger_than_the_queue_runs_whole(client: SandboxClient) -> None:
    assert "exec-batch" in client.features()
    size = 8 * client.health()["max_inflight"]
    execs = [{"code": f"print({number})"} for number in range(size)]
    found = dict(client.exec_batch("python", execs))
    assert [found[index]["stdout"] for index in range(size)] == [f"{index}\n" for index in range(size)]


def test_one_exec_that_dies_leaves_the_others_alone(client: SandboxClient) -> None:
    execs = [{"code": "import os; os.kill(os.getpid(), 9)"}, {"command": "exit 3"}, {"code": "print(1)", "seed": "x"}]
    with pytest.raises(ConfigError, match="seed"):
        list(client.exec_batch("python", execs))
    execs[2]["seed"] = "ab" * 32
    found = dict(client.exec_batch("python", execs))
    assert (found[0]["status"], found[1]["exit_code"], found[2]["seed"]) == ("signal", 3, "ab" * 32)


def test_unknown_template_of_a_batch(client: SandboxClient) -> None:
    with pytest.raises(ConfigError, match=r"template: expected one of .*python.*, found 'ruby'"):
        list(client.exec_batch("ruby", EXECS))


def test_caller_that_stops_early_stops_what_is_left(client: SandboxClient) -> None:
    before = client.health()["running"]
    outcomes = client.exec_batch("python", [{"code": "1"}, *[{"code": "while True: pass", "timeout_seconds": 600}] * 3])
    assert next(iter(outcomes))[0] == 0
    outcomes.close()
    until(lambda: client.health()["running"] == before)


def test_deadline_of_a_batch_is_kept_by_the_daemon(client: SandboxClient) -> None:
    before = client.health()["running"]
    execs = [{"code": "while True: pass", "timeout_seconds": 600}] * 2
    found = dict(client.exec_batch("python", execs, deadline=time.monotonic() + 1))
    assert all(isinstance(outcome, SandboxUnavailable) for outcome in found.values())
    until(lambda: client.health()["running"] == before)


# ---- operators ---------------------------------------------------------------------------------------------------


def test_drain_without_an_admin_socket() -> None:
    with (
        ScriptedServer(None, [answer({"status": "ok"})]) as server,
        SandboxClient(**server.where) as client,
        pytest.raises(ConfigError, match=r"drain: expected a daemon with an admin socket at http.*, found None"),
    ):
        client.drain()


def test_path_of_another_machine_s_daemon_is_not_drained(tmp_path: Path) -> None:
    path = tmp_path / "admin.sock"
    health = {"status": "ok", "pid": 5, "features": ["drain"], "admin_socket": str(path)}
    with (
        ScriptedServer(path, [answer({**health, "pid": 6})]) as admin,
        ScriptedServer(None, [answer(health)]) as server,
        SandboxClient(**server.where) as client,
    ):
        with pytest.raises(ConfigError, match=r"drain: expected the daemon of http.*, found 6"):
            client.drain()
        assert [request.method for request in admin.requests] == ["GET"]
