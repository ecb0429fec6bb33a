"""What the client sends, and how it holds its connections; against a server on a real socket."""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from scripted import Received, ScriptedServer, answer, executed

from collimate_ray.errors import ConfigError, SandboxUnavailable
from collimate_ray.sandbox import CollimateClient, SandboxClient
from collimate_ray.sandbox.client import DEFAULT_URL
from collimate_ray.sandbox.wire import LIMIT_NAMES, STATUS_OF, ErrorCode


def echo(request: Received, connection: socket.socket) -> bool:
    connection.sendall(executed(request.json["command"]))
    return True


def echo_and_hang_up(request: Received, connection: socket.socket) -> bool:
    echo(request, connection)
    return False


def echo_most(request: Received, connection: socket.socket) -> bool:
    """Says that it hangs up, and does, at one answer in 50."""
    last = int(request.json["command"]) % 50 == 0
    connection.sendall(answer({"stdout": "", "exit_code": 0}, headers="Connection: close\r\n" if last else ""))
    return not last


@pytest.fixture(params=["tcp", "unix"])
def socket_path(request: pytest.FixtureRequest, tmp_path: Path) -> Path | None:
    return tmp_path / "s" if request.param == "unix" else None


@pytest.fixture
def echoing(socket_path: Path | None) -> Iterator[ScriptedServer]:
    with ScriptedServer(socket_path, [echo]) as server:
        yield server


def test_bodies_hold_only_what_was_given() -> None:
    script = [answer({"session_id": "s"}, 201), answer({"session_id": "s"}, 201), executed()]
    with ScriptedServer(None, script) as server, SandboxClient(**server.where) as client:
        client.create_session("python")
        client.create_session("python", egress={"mode": "none"}, owner="o", ttl_seconds=5)
        client.exec_once("python", command="true")
        client.exec_once("python", code="1", files=[{"path": "a", "content": "b"}], seed="0f" * 32, timeout_seconds=9)
        client.session_exec(
            "s", commands=[("a", "b")], limits={"time_s": 1}, stdin=b"\x00\xff", exec_id="e1", timeout_seconds=3600
        )
        client.exec_once("python", command="true", egress={"mode": "open"}, owner="o", files=[])
        client.renew_owner("o", 30)
        bodies = [request.json for request in server.requests]
    assert bodies == [
        {"template_id": "python"},
        {"template_id": "python", "egress": {"mode": "none"}, "owner": "o", "ttl_seconds": 5},
        {"template_id": "python", "command": "true", "timeout_seconds": 30},
        {
            "template_id": "python",
            "code": "1",
            "files": [{"path": "a", "content": "b"}],
            "seed": "0f" * 32,
            "timeout_seconds": 9,
        },
        {
            "commands": [["a", "b"]],
            "limits": {"time_s": 1},
            "stdin_b64": "AP8=",
            "id": "e1",
            "timeout_seconds": 3600,
        },
        {
            "template_id": "python",
            "command": "true",
            "timeout_seconds": 30,
            "egress": {"mode": "open"},
            "owner": "o",
        },
        {"ttl_seconds": 30},
    ]


def test_routes_and_quoting() -> None:
    with ScriptedServer(None, [answer([])]) as server, SandboxClient(**server.where) as client:
        client.list_sessions()
        server.actions = [executed()]
        client.get_session("a/b c?d#é")
        client.delete_session("a%2Fb")
        client.cancel_exec("e 1")
        client.drop_owner("o/1")
        client.session_exec("s", command="true")
        sent = [(request.method, request.path) for request in server.requests]
    assert sent == [
        ("GET", "/v1/sessions"),
        ("GET", "/v1/sessions/a%2Fb%20c%3Fd%23%C3%A9"),
        ("DELETE", "/v1/sessions/a%252Fb"),
        ("DELETE", "/v1/execs/e%201"),
        ("DELETE", "/v1/owners/o%2F1"),
        ("POST", "/v1/sessions/s/exec"),
    ]


def test_features_are_asked_for_once() -> None:
    health = {"status": "ok", "templates": ["python"], "features": ["usage", "limits"]}
    with ScriptedServer(None, [answer(health)]) as server, SandboxClient(**server.where) as client:
        assert client.features() == client.features() == frozenset({"usage", "limits"})
        assert len(server.requests) == 1
        assert client.templates() == ["python"]


def test_a_plain_daemon_has_no_features() -> None:
    with ScriptedServer(None, [answer({"status": "ok"})]) as server, SandboxClient(**server.where) as client:
        assert client.features() == frozenset()


def test_chunked_answer_is_read() -> None:
    body = executed("a" * 10).partition(b"\r\n\r\n")[2]
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (body[:7], body[7:])) + b"0\r\n\r\n"
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    with ScriptedServer(None, [head + chunks]) as server, SandboxClient(**server.where) as client:
        assert client.exec_once("python", command="x")["stdout"] == "a" * 10
        assert client.exec_once("python", command="x")["stdout"] == "a" * 10
        assert server.connections == 1


def test_url_with_a_path_and_an_ipv6_host() -> None:
    with ScriptedServer(None, [executed()]) as server:
        with SandboxClient(f"{server.where['base_url']}/serve/") as client:
            client.exec_once("python", command="x")
        assert server.requests[0].path == "/serve/v1/exec"
    with socket.socket(socket.AF_INET6) as unused:
        unused.bind(("::1", 0))  # bound, not listening: refused
        with (
            SandboxClient(f"http://[::1]:{unused.getsockname()[1]}", retries=0) as client,
            pytest.raises(SandboxUnavailable, match="refused"),
        ):
            client.health()


def test_large_body_that_is_refused_unread_is_told() -> None:
    refusal = answer({"error": "too large", "error_code": "bad_request"}, 413)

    def unread(connection: socket.socket, told: threading.Event) -> None:
        connection.sendall(refusal)
        connection.shutdown(socket.SHUT_RD)  # what is still sent breaks the pipe
        told.wait()
        connection.close()

    here, there = socket.socketpair()
    told = threading.Event()
    server = threading.Thread(target=unread, args=(there, told))
    with SandboxClient(unix_socket="/nowhere") as client:
        client._transport._connection = lambda _: here  # type: ignore[method-assign]
        server.start()
        with pytest.raises(ConfigError, match="too large"):
            client.exec_once("python", command="x" * (8 << 20))
    told.set()
    server.join()


def test_odd_text_crosses_whole(echoing: ScriptedServer) -> None:
    text = "\ud83d \x00 é \U0001f600\n" + "x" * 300_000
    with SandboxClient(**echoing.where) as client:
        assert client.exec_once("python", command=text)["stdout"] == text


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({}, "one of command, commands or code"),
        ({"command": "x", "timeout_seconds": 0}, "timeout_seconds: expected a whole number in 1..3600, found 0"),
        ({"command": "x", "timeout_seconds": 3601}, "3601"),
        ({"command": "x", "timeout_seconds": 1.5}, "1.5"),
        ({"command": "x", "timeout_seconds": True}, "True"),
        ({"command": "x", "seed": "abc"}, "seed: expected 64 hex characters, found 'abc'"),
        ({"command": "x", "limits": {"time_s": float("nan")}}, "request: expected values that JSON has"),
        ({"command": b"x"}, "request: expected values that JSON has"),
    ],
)
def test_wrong_exec_is_told_before_anything_is_sent(kwargs: dict[str, Any], words: str) -> None:
    with SandboxClient("http://127.0.0.1:9") as client, pytest.raises(ConfigError) as caught:
        client.exec_once("python", **kwargs)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("session_id", ["", ".", ".."])
def test_wrong_session_id(session_id: str) -> None:
    with SandboxClient("http://127.0.0.1:9") as client, pytest.raises(ConfigError, match="id: expected a name"):
        client.delete_session(session_id)


@pytest.mark.parametrize(
    "kwargs",
    [
        {"base_url": ""},
        {"base_url": "127.0.0.1:80"},
        {"base_url": "ftp://x"},
        {"base_url": "http://"},
        {"base_url": "http://x:99999"},
        {"base_url": 5},
        {"base_url": "http://h/a b"},
        {"base_url": "http://h/?a=b"},
        {"base_url": "http://h\r\nX: y"},
        {"base_url": "http://é"},
        {"base_url": "http://" + "x" * 64},
        {"unix_socket": ""},
        {"unix_socket": "/" + "x" * 107},
        {"timeout": 0},
        {"timeout": float("nan")},
        {"retries": -1},
        {"backoff": -0.1},
        {"retry_budget": -1},
        {"pool_size": 0},
    ],
)
def test_wrong_arguments_name_the_field(kwargs: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"^{next(iter(kwargs))}: expected") as caught:
        SandboxClient(**kwargs)
    assert "\n" not in str(caught.value)


def test_names_and_default_of_the_published_sdk() -> None:
    assert CollimateClient is SandboxClient
    with CollimateClient() as client:
        assert client.address == DEFAULT_URL
    with CollimateClient("http://h:1/") as client:
        assert client.address == "http://h:1"


def test_each_error_code_has_a_status() -> None:
    assert set(STATUS_OF) == {value for name, value in vars(ErrorCode).items() if name.isupper()}
    assert "time_s" in LIMIT_NAMES


def test_one_connection_serves_many_requests(echoing: ScriptedServer) -> None:
    with SandboxClient(**echoing.where) as client:
        for number in range(50):
            client.exec_once("python", command=str(number))
    assert echoing.connections == 1


def test_idle_connection_that_the_server_closed_is_not_used(socket_path: Path | None) -> None:
    with ScriptedServer(socket_path, [echo_and_hang_up]) as server, SandboxClient(**server.where, retries=0) as client:
        for number in range(100):
            server.hung_up.clear()
            # a POST on a closed connection would be ambiguous, and raise
            assert client.exec_once("python", command=str(number))["stdout"] == str(number)
            assert server.hung_up.wait(10)
        assert len(server.requests) == server.connections == 100


def test_answer_after_an_abandoned_one_is_the_right_one() -> None:
    """A request that timed out leaves nothing on a connection that the next one would read."""
    may_answer = threading.Event()

    def late(request: Received, connection: socket.socket) -> bool:
        may_answer.wait(10)
        return echo(request, connection)

    with ScriptedServer(None, [late, echo]) as server, SandboxClient(**server.where, timeout=0.1, retries=0) as client:
        with pytest.raises(Exception, match="timed out"):
            client._call("POST", "/v1/exec", {"command": "first"})
        may_answer.set()
        assert client.exec_once("python", command="second")["stdout"] == "second"
        assert server.connections == 2


def test_threads_get_their_own_answers(echoing: ScriptedServer, caplog: pytest.LogCaptureFixture) -> None:
    with SandboxClient(**echoing.where) as client, ThreadPoolExecutor(32) as threads:
        sent = [f"text {number} " + "x" * (number % 7 * 1000) for number in range(1600)]
        with caplog.at_level(logging.WARNING):
            got = list(threads.map(lambda text: client.exec_once("python", command=text)["stdout"], sent))
    assert got == sent
    assert echoing.connections <= 32
    assert caplog.records == []


def test_more_threads_than_kept_connections(echoing: ScriptedServer) -> None:
    with SandboxClient(**echoing.where, pool_size=2) as client, ThreadPoolExecutor(16) as threads:
        sent = [str(number) for number in range(400)]
        assert list(threads.map(lambda text: client.exec_once("python", command=text)["stdout"], sent)) == sent


def test_ten_thousand_requests_leak_no_descriptor(socket_path: Path | None) -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    with ScriptedServer(socket_path, [echo_most]) as server, SandboxClient(**server.where) as client:
        before = descriptors()
        for number in range(5000):  # twice: on TCP and on a unix socket
            client.exec_once("python", command=str(number))
        client.close()
        assert server.hung_up.wait(10)
        assert server.connections == 101
        assert descriptors() <= before + 1  # the server's side of the last connection may not be closed yet


def test_forked_child_uses_connections_of_its_own(echoing: ScriptedServer) -> None:
    with SandboxClient(**echoing.where) as client:
        client.exec_once("python", command="before")
        pid = os.fork()
        if pid == 0:
            right = False
            try:
                right = client.exec_once("python", command="child")["stdout"] == "child"
            finally:
                os._exit(0 if right else 1)
        assert os.waitpid(pid, 0)[1] == 0
        assert client.exec_once("python", command="after")["stdout"] == "after"
    by_connection = [request.connection for request in echoing.requests]
    assert by_connection[0] == by_connection[2] != by_connection[1]


def test_environment_of_proxies_and_netrc_is_not_read(
    echoing: ScriptedServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login a password b\nmachine localhost login a password b\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    with SandboxClient(**echoing.where, retries=0) as client:
        client.exec_once("python", command="x")
    assert "authorization" not in echoing.requests[0].headers
    assert "cookie" not in echoing.requests[0].headers
