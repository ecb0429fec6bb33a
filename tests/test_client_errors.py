"""The error table of WIRE.md, row by row, against a server on a real socket; and what may be sent again."""

from __future__ import annotations

import pickle
import random
import socket
import threading
import time
from pathlib import Path

import pytest
from scripted import Action, Received, ScriptedServer, answer, closed, executed, refused, reset

from collimate_ray.core.failures import Fate, fate_of
from collimate_ray.errors import (
    ConfigError,
    InfraError,
    SandboxAtCapacity,
    SandboxDraining,
    SandboxUnavailable,
    SessionLost,
    WireError,
)
from collimate_ray.sandbox import SandboxClient
from collimate_ray.sandbox.transport import MAX_RESPONSE_BYTES

#: times a request that may be sent again is sent, with the default of three retries
ALL = 4

TRUNCATED = answer({"status": "ok", "stdout": "x" * 100, "exit_code": 0})[:-20]
ENDLESS = f"HTTP/1.1 200 OK\r\nContent-Length: {MAX_RESPONSE_BYTES + 1}\r\n\r\n".encode()


def cut(_request: Received, connection: socket.socket) -> bool:
    connection.sendall(TRUNCATED)
    return False


def nonsense(_request: Received, connection: socket.socket) -> bool:
    connection.sendall(b"\x00\x01 this is no HTTP\r\n\r\n")
    return False


#: what the server does, what the client raises, requests sent for a POST, requests sent for a GET
ROWS: list[tuple[Action, type[Exception], int, int]] = [
    (refused("draining"), SandboxDraining, ALL, ALL),
    (refused("at_capacity"), SandboxAtCapacity, ALL, ALL),
    (refused("session_bringup_failed"), SandboxAtCapacity, ALL, ALL),
    (answer({"error": "e", "error_code": "session_bringup_failed"}, 500), SandboxAtCapacity, ALL, ALL),
    (refused("template_id_required"), ConfigError, 1, 1),
    (refused("bad_request"), ConfigError, 1, 1),
    (refused("invalid_seed"), ConfigError, 1, 1),
    (answer({"error": "too large"}, 413), ConfigError, 1, 1),
    (refused("no_such_session"), SessionLost, 1, 1),
    (refused("session_gone"), SessionLost, 1, 1),
    (refused("zygote_lost"), SandboxUnavailable, 1, ALL),
    (refused("deadline"), SandboxUnavailable, 1, ALL),
    (refused("internal"), SandboxUnavailable, 1, ALL),
    (refused("cancelled"), SandboxUnavailable, 1, 1),
    (refused("forbidden"), ConfigError, 1, 1),
    (answer({}, 410), SessionLost, 1, 1),
    (refused("not_found"), WireError, 1, 1),
    (answer(b"<html>not JSON</html>", 400), WireError, 1, 1),
    (answer({"error": "?"}, 418), WireError, 1, 1),
    (answer({}, 302, "Location: http://127.0.0.1:9/\r\n"), WireError, 1, 1),
    (answer({"error": "boom"}, 500), SandboxUnavailable, 1, ALL),
    (answer(b"<html>bad gateway</html>", 502), SandboxUnavailable, 1, ALL),
    (answer([1], 503), SandboxUnavailable, 1, ALL),
    (reset, SandboxUnavailable, 1, ALL),
    (closed, SandboxUnavailable, 1, ALL),
    (nonsense, WireError, 1, ALL),
    (cut, WireError, 1, ALL),
    (ENDLESS, WireError, 1, 1),
    (answer(b"not JSON"), WireError, 1, 1),
    (answer(b"[" * 100_000), WireError, 1, 1),
    (answer([]), WireError, 1, 1),
    (answer({"exit_code": 0}), WireError, 1, 1),
]


@pytest.mark.parametrize("on_unix", [False, True], ids=["tcp", "unix"])
@pytest.mark.parametrize(("action", "error", "posts", "gets"), ROWS)
def test_error_table(
    tmp_path: Path, on_unix: bool, action: Action, error: type[Exception], posts: int, gets: int
) -> None:
    path = tmp_path / "s" if on_unix else None
    with ScriptedServer(path, [action]) as server, SandboxClient(**server.where, backoff=0.001) as client:
        with pytest.raises(error) as caught:
            client.exec_once("python", command="true")
        assert type(caught.value) is error
        assert len(server.requests) == posts
        assert pickle.loads(pickle.dumps(caught.value)).args == caught.value.args
        server.requests.clear()
        with pytest.raises(error):
            client.health()
        assert len(server.requests) == gets


@pytest.mark.parametrize(
    "payload",
    [
        {"stdout": None, "exit_code": 0},
        {"stdout": ["a"], "exit_code": 0},
        {"stdout": "a"},
        {"stdout": "a", "exit_code": "0"},
        {"stdout": "a", "exit_code": True},
        {"stdout": "a", "exit_code": None},
    ],
)
def test_exec_answer_of_a_wrong_shape(payload: dict[str, object]) -> None:
    with ScriptedServer(None, [answer(payload)]) as server, SandboxClient(**server.where) as client:
        with pytest.raises(WireError):
            client.session_exec("s", command="true")
        assert len(server.requests) == 1


@pytest.mark.parametrize("payload", [{}, {"session_id": ""}, {"session_id": 3}, []])
def test_created_session_without_an_id(payload: object) -> None:
    with (
        ScriptedServer(None, [answer(payload, 201)]) as server,
        SandboxClient(**server.where) as client,
        pytest.raises(WireError),
    ):
        client.create_session("python")


@pytest.mark.parametrize("payload", [{"status": "ok", "templates": "python"}, {"status": "ok", "templates": [1]}])
def test_templates_of_a_wrong_shape(payload: object) -> None:
    with (
        ScriptedServer(None, [answer(payload)]) as server,
        SandboxClient(**server.where) as client,
        pytest.raises(WireError),
    ):
        client.templates()


def test_refused_work_is_sent_again_until_it_is_taken() -> None:
    script = [refused("at_capacity"), refused("draining"), refused("session_bringup_failed"), executed("done")]
    with ScriptedServer(None, script) as server, SandboxClient(**server.where, backoff=0.001) as client:
        assert client.exec_once("python", command="true")["stdout"] == "done"
        assert len({request.body for request in server.requests}) == 1
        assert len(server.requests) == 4


def test_unknown_template_names_it_and_those_there_are() -> None:
    health = answer({"status": "ok", "templates": ["python", "py"]})
    with ScriptedServer(None, [refused("no_template"), health]) as server, SandboxClient(**server.where) as client:
        with pytest.raises(ConfigError, match="template: expected one of python, py, found 'ruby'"):
            client.create_session("ruby")
        assert [request.path for request in server.requests] == ["/v1/sessions", "/v1/health"]


def test_unknown_template_of_a_daemon_whose_health_fails() -> None:
    with (
        ScriptedServer(None, [refused("no_template"), answer({}, 500)]) as server,
        SandboxClient(**server.where, retries=0) as client,
        pytest.raises(ConfigError, match="no_template"),
    ):
        client.exec_once("ruby", command="true")


def test_missing_things_that_do_not_matter() -> None:
    script = [refused("no_such_session"), answer({"deleted": False, "session_id": "s"}, 404), refused("session_gone")]
    with ScriptedServer(None, script) as server, SandboxClient(**server.where) as client:
        assert [client.delete_session("s")["deleted"] for _ in script] == [False, False, False]
    script = [refused("no_such_exec"), refused("not_found"), answer({"cancelled": True}), refused("not_found")]
    with ScriptedServer(None, script) as server, SandboxClient(**server.where) as client:
        assert [client.cancel_exec("e") for _ in range(3)] == [False, False, True]
        client.drop_owner("o")


class Waking(SandboxClient):
    """Starts a server at its first pause: the daemon that comes up while the client waits."""

    def __init__(self, path: Path) -> None:
        super().__init__(unix_socket=path, backoff=0.001)
        self.path = path
        self.servers: list[ScriptedServer] = []

    def _paused(self, attempt: int, until: float) -> bool:
        self.servers.append(ScriptedServer(self.path, [executed("up")]))
        return super()._paused(attempt, until)


def test_refused_connection_of_a_post_is_tried_again(tmp_path: Path) -> None:
    with Waking(tmp_path / "s") as client:
        assert client.exec_once("python", command="true")["stdout"] == "up"
        assert len(client.servers) == 1
        with client.servers[0] as server:
            assert len(server.requests) == 1


def test_nobody_there(tmp_path: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound, not listening: refused
        where = [{"base_url": f"http://127.0.0.1:{unused.getsockname()[1]}"}, {"unix_socket": str(tmp_path / "none")}]
        for kwargs in where:
            with SandboxClient(**kwargs, backoff=0.001) as client, pytest.raises(SandboxUnavailable) as caught:
                client.exec_once("python", command="true")
            assert caught.value.admitted is False
            assert str(caught.value).startswith(f"POST /v1/exec at {client.address}: [Errno ")


def test_full_backlog_of_a_unix_socket_is_nothing_sent(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(0)
        waiting = [socket.socket(socket.AF_UNIX) for _ in range(4)]
        for one in waiting:
            one.setblocking(False)
            one.connect_ex(path)
        with SandboxClient(unix_socket=path, retries=0) as client, pytest.raises(SandboxUnavailable) as caught:
            client.exec_once("python", command="true")
        assert caught.value.admitted is False
        for one in waiting:
            one.close()


def wait_for_stop(server: list[ScriptedServer]) -> Action:
    def hang(_request: Received, _connection: socket.socket) -> bool:
        server[0].stopping.wait()
        return False

    return hang


def test_silence_is_ambiguous_and_not_sent_again() -> None:
    held: list[ScriptedServer] = []
    with ScriptedServer(None, [wait_for_stop(held)]) as server, SandboxClient(**server.where, timeout=0.1) as client:
        held.append(server)
        with pytest.raises(SandboxUnavailable) as caught:
            client.create_session("python")
        assert caught.value.admitted is True
        assert len(server.requests) == 1
        server.stopping.set()


@pytest.mark.parametrize(
    ("code", "admitted", "fate"),
    [
        ("zygote_lost", True, Fate.HOST_DEATH),
        ("internal", True, Fate.HOST_DEATH),
        ("cancelled", True, Fate.HOST_DEATH),
        ("session_gone", True, Fate.SESSION_DEATH),
        ("session_bringup_failed", False, Fate.LATER),
        ("at_capacity", False, Fate.LATER),
        ("draining", False, Fate.ELSEWHERE),
    ],
)
def test_only_the_death_of_its_own_session_is_charged_to_a_candidate(code: str, admitted: bool, fate: Fate) -> None:
    with ScriptedServer(None, [refused(code)]) as server, SandboxClient(**server.where, retries=0) as client:
        with pytest.raises(InfraError) as caught:
            client.exec_once("python", command="true")
        assert (caught.value.admitted, caught.value.retriable, fate_of(caught.value)) == (admitted, True, fate)


def test_session_that_never_was_ran_nothing() -> None:
    with ScriptedServer(None, [refused("no_such_session")]) as server, SandboxClient(**server.where) as client:
        with pytest.raises(SessionLost) as caught:
            client.session_exec("s", command="true")
        assert caught.value.admitted is False


def test_deadline_cuts_the_socket_time_out() -> None:
    held: list[ScriptedServer] = []
    with ScriptedServer(None, [wait_for_stop(held)]) as server, SandboxClient(**server.where) as client:
        held.append(server)
        began = time.monotonic()
        with pytest.raises(SandboxUnavailable):
            client.exec_once("python", command="true", deadline=began + 0.2)
        assert 0.2 <= time.monotonic() - began < 20  # without the deadline: 120 s
        server.stopping.set()


def test_deadline_that_passed_sends_nothing() -> None:
    with ScriptedServer(None, [executed()]) as server, SandboxClient(**server.where) as client:
        with pytest.raises(SandboxUnavailable) as caught:
            client.session_exec("s", command="true", deadline=time.monotonic() - 1)
        assert caught.value.admitted is False
        assert server.requests == []


def test_deadline_ends_the_retries_with_the_last_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random, "uniform", lambda low, high: high)
    with (
        ScriptedServer(None, [refused("at_capacity")]) as server,
        SandboxClient(**server.where, retries=50, backoff=5) as client,
    ):
        with pytest.raises(SandboxAtCapacity):
            client.exec_once("python", command="true", deadline=time.monotonic() + 4)
        assert len(server.requests) == 1


def test_pauses_are_exponential_with_full_jitter_within_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[tuple[float, float]] = []

    def highest(low: float, high: float) -> float:
        drawn.append((low, high))
        return high

    monkeypatch.setattr(random, "uniform", highest)
    with ScriptedServer(None, [refused("at_capacity")]) as server:
        with SandboxClient(**server.where, backoff=0.01) as client, pytest.raises(SandboxAtCapacity):
            client.exec_once("python", command="true")
        assert drawn == [(0.0, 0.01), (0.0, 0.02), (0.0, 0.04)]
        server.requests.clear()
        with (
            SandboxClient(**server.where, retries=10**6, backoff=0.01, retry_budget=0.2) as client,
            pytest.raises(SandboxAtCapacity),
        ):
            client.exec_once("python", command="true")
        # 0.01 + 0.02 + 0.04 + 0.08 = 0.15; the next pause would pass the budget
        assert 2 <= len(server.requests) <= 5


def test_socket_time_out_is_sized_to_the_exec(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    with ScriptedServer(None, [executed()]) as server, SandboxClient(**server.where, timeout=50) as client:
        real = client._transport.open
        monkeypatch.setattr(client._transport, "open", lambda *a: (waits.append(a[3]), real(*a))[1])
        client.exec_once("python", command="true", timeout_seconds=10)
        client.session_exec("s", command="true", timeout_seconds=3600)
        client.exec_once("python", command="true", timeout_seconds=100, deadline=time.monotonic() + 7)
    assert waits[:2] == [50, 3630]
    assert 6 < waits[2] <= 7


def test_errors_from_many_threads_are_their_own() -> None:
    script = [refused("at_capacity"), answer({}, 500)]
    found: list[type[BaseException]] = []
    with ScriptedServer(None, script) as server, SandboxClient(**server.where, retries=0) as client:

        def call() -> None:
            try:
                client.exec_once("python", command="true")
            except Exception as error:  # noqa: BLE001 - recorded
                found.append(type(error))

        threads = [threading.Thread(target=call) for _ in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(kind.__name__ for kind in found) == ["SandboxAtCapacity"] + ["SandboxUnavailable"] * 19
