"""Which daemon connect() takes, and the embedded one: found or started, once, by whoever comes first."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from scripted import ScriptedServer, answer

from collimate_ray.config import runtime_dir
from collimate_ray.errors import ConfigError, SandboxDraining, SandboxUnavailable, WireError
from collimate_ray.messages import GraderConfig
from collimate_ray.node_daemon import NodeDaemon
from collimate_ray.sandbox import SandboxClient, connect, embedded
from collimate_ray.sandbox import connect as connect_function
from collimate_ray.sandbox.embedded import Daemon, ensure_daemon, stop_daemon
from collimate_ray.sandbox.wire import TIERS

connect_module = sys.modules[connect_function.__module__]

SOCKET, URL = "COLLIMATE_SERVE_SOCKET", "COLLIMATE_SERVE_URL"


@pytest.mark.parametrize(
    ("kwargs", "environ", "expected"),
    [
        ({"unix_socket": "/a", "api_key": "k", "base_url": "http://b"}, {SOCKET: "/e"}, "/a"),
        ({"base_url": "http://b"}, {SOCKET: "/e", "COLLIMATE_API_KEY": "k", URL: "http://u"}, "http://b"),
        ({}, {SOCKET: "/e", "COLLIMATE_API_KEY": "k", URL: "http://u"}, "/e"),
        ({}, {URL: "http://u"}, "http://u"),
        ({}, {}, "/mounted"),
    ],
)
def test_order(
    kwargs: dict[str, Any],
    environ: dict[str, str],
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    mounted = tmp_path / "serve.sock"
    mounted.touch()
    monkeypatch.setattr(connect_module, "SESSION_SOCKET", str(mounted))
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with connect(**kwargs, timeout=7) as client:
        assert client.address == expected.replace("/mounted", str(mounted))
        assert client.timeout == 7


@pytest.mark.parametrize(
    ("kwargs", "environ", "field"),
    [
        ({"api_key": "col_pro_x", "base_url": "http://b"}, {SOCKET: "/e"}, "api_key"),
        ({}, {"COLLIMATE_API_KEY": "col_pro_x", URL: "http://u"}, "COLLIMATE_API_KEY"),
    ],
)
def test_the_gateway_is_for_later(
    kwargs: dict[str, Any], environ: dict[str, str], field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=f"^{field}: expected none") as caught:
        connect(**kwargs)
    assert "col_pro_x" not in str(caught.value)


def test_wrong_slots_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLLIMATE_SLOTS", "none")
    with pytest.raises(ConfigError, match="COLLIMATE_SLOTS"):
        connect()


HEALTH = {"status": "ok", "pid": 1, "templates": ["python"], "tier": "landlock"}


@pytest.mark.parametrize(("found", "good"), [(t, i >= TIERS.index("landlock")) for i, t in enumerate(TIERS)])
def test_better_tier_than_the_required_is_good(found: str, good: bool) -> None:
    with ScriptedServer(None, [answer({**HEALTH, "tier": found})]) as server:
        expected = pytest.raises(
            ConfigError, match=f"'landlock' or better, found '{found}' at {server.where['base_url']}"
        )
        with contextlib.nullcontext() if good else expected:
            connect(server.where["base_url"], require_tier="landlock").close()


@pytest.mark.parametrize("health", [{"status": "ok"}, {"status": "ok", "tier": None}, {"status": "ok", "tier": "kvm"}])
def test_daemon_that_names_no_tier_of_ours_has_none(health: dict[str, Any]) -> None:
    with ScriptedServer(None, [answer(health)]) as server:
        with pytest.raises(ConfigError, match="require_tier: expected a daemon of tier 'rlimits' or better, found "):
            connect(server.where["base_url"], require_tier="rlimits")
        connect(server.where["base_url"]).close()
        assert len(server.requests) == 1


def test_tier_of_the_environment_holds_wherever_the_daemon_comes_from(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("COLLIMATE_REQUIRE_TIER", "full")
    with ScriptedServer(tmp_path / "s", [answer(HEALTH)]) as server:
        for kwargs in (server.where, {}):
            monkeypatch.setenv(SOCKET, server.where["unix_socket"])
            with pytest.raises(ConfigError, match="'full' or better, found 'landlock'"):
                connect(**kwargs)
        # the argument wins
        connect(**server.where, require_tier="seccomp").close()


def test_node_takes_a_better_tier_and_refuses_a_lower_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with ScriptedServer(tmp_path / "s", [answer(HEALTH)]) as server:
        where = server.where["unix_socket"]
        for wanted in ("seccomp", "landlock"):
            node = NodeDaemon(GraderConfig(daemon=where, require_tier=wanted), "n" * 56, 1, "owner")
            node.open()
            node.close(False)
        monkeypatch.setenv("COLLIMATE_REQUIRE_TIER", "userns")  # of the node itself
        node = NodeDaemon(GraderConfig(daemon=where), "n" * 56, 1, "owner")
        with pytest.raises(ConfigError, match=f"'userns' or better, found 'landlock' at {where}"):
            node.open()
        node.close(False)


def test_tier_that_is_none() -> None:
    for call in (lambda: connect("http://b", require_tier="kvm"), lambda: ensure_daemon("k", require_tier="kvm")):
        with pytest.raises(ConfigError, match=r"require_tier: expected one of full, userns, .*, found 'kvm'"):
            call()


@pytest.fixture
def key() -> Iterator[str]:
    """A key whose daemon is ended after the test."""
    name = f"test-{os.urandom(3).hex()}"
    yield name
    path = str(runtime_dir() / name / "serve.sock")
    if os.path.exists(path):
        with SandboxClient(unix_socket=path) as client:
            stop_daemon(Daemon(path, client.health()["pid"], False))


def until(condition: Callable[[], bool]) -> None:
    """Wait for another process; the test's own time-out ends it."""
    while not condition():
        time.sleep(0.01)


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def descriptors_of(pid: int) -> list[str]:
    """What a process has open; one that closes while we look is left out."""
    found = []
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):
            found.append(os.readlink(f"/proc/{pid}/fd/{name}"))
    return found


def test_started_then_found_then_stopped(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    read, write = os.pipe()
    os.set_inheritable(write, True)
    first = ensure_daemon(key, slots=3, memory_mib=2048)
    assert first.started
    assert ensure_daemon(key) == Daemon(first.socket, first.pid, False)
    with SandboxClient(unix_socket=first.socket) as client:
        health = client.health()
        assert client.exec_once("python", code="print('hello')")["stdout"] == "hello\n"
    assert (health["pid"], health["slots"]) == (first.pid, 3)
    # no child of ours, nothing of ours
    assert parent_of(first.pid) != os.getpid()
    assert os.getsid(first.pid) != os.getsid(0)
    assert os.readlink(f"/proc/{first.pid}/cwd") == "/"
    targets = descriptors_of(first.pid)
    assert os.readlink(f"/proc/self/fd/{write}") not in targets
    assert b"HF_TOKEN" not in Path(f"/proc/{first.pid}/environ").read_bytes()
    os.close(read)
    os.close(write)
    stop_daemon(first)
    assert not os.path.exists(first.socket)
    stop_daemon(first)


ENSURE = """
import json, sys
from collimate_ray.sandbox.embedded import ensure_daemon
sys.stdin.readline()
daemon = ensure_daemon(sys.argv[1])
print(json.dumps([daemon.pid, daemon.started]))
"""


def test_eight_processes_at_once_get_one_daemon(key: str) -> None:
    command = [sys.executable, "-c", ENSURE, key]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    starters = [subprocess.Popen(command, **pipes) for _ in range(8)]
    for starter in starters:
        starter.stdin.write("go\n")
        starter.stdin.flush()
    results = [json.loads(starter.communicate()[0]) for starter in starters]
    assert len({pid for pid, _ in results}) == 1
    assert sorted(started for _, started in results) == [False] * 7 + [True]
    assert not list(runtime_dir().glob("*.lock"))


def test_dead_socket_is_replaced(key: str) -> None:
    first = ensure_daemon(key)
    os.kill(first.pid, signal.SIGKILL)
    until(lambda: not embedded._running(first.pid))
    assert os.path.exists(first.socket)
    second = ensure_daemon(key)
    assert second.started
    assert second.pid != first.pid


def test_daemon_that_ends_is_replaced_by_one_that_lives(key: str) -> None:
    first = ensure_daemon(key)
    os.kill(first.pid, signal.SIGTERM)
    until(lambda: not embedded._running(first.pid))
    assert not list(runtime_dir().glob(f"{key}*"))  # its log is gone too
    second = ensure_daemon(key)
    assert second.started
    stop_daemon(first)  # a pid that is not the daemon's any more is left alone
    assert ensure_daemon(key) == Daemon(second.socket, second.pid, False)


def test_daemon_that_does_not_answer_is_not_replaced(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    daemon = ensure_daemon(key)
    monkeypatch.setattr(embedded, "PROBE_S", 0.2)
    os.kill(daemon.pid, signal.SIGSTOP)
    try:
        with pytest.raises(SandboxUnavailable, match="timed out"):
            ensure_daemon(key)
    finally:
        os.kill(daemon.pid, signal.SIGCONT)
    monkeypatch.undo()
    assert ensure_daemon(key).pid == daemon.pid


@pytest.mark.parametrize("key_text", ["", "../up", "a b", "ä"])
def test_keys_that_name_no_directory(key_text: str) -> None:
    with pytest.raises(ConfigError, match="key: expected letters"):
        ensure_daemon(key_text)


def test_start_that_fails_says_why(key: str) -> None:
    with pytest.raises(SandboxUnavailable, match=r"the embedded daemon did not start: .*slots") as caught:
        ensure_daemon(key, slots=0)
    assert caught.value.admitted is False
    assert not list(runtime_dir().glob(f"{key}*"))


def test_what_answers_and_is_no_daemon_is_left_alone(key: str) -> None:
    folder = runtime_dir() / key
    folder.mkdir(mode=0o700)
    with (
        ScriptedServer(folder / "serve.sock", [answer({"status": "ok"})]),
        pytest.raises(WireError, match="no daemon of ours"),
    ):
        ensure_daemon(key)
    folder.rmdir()


def test_tier_is_passed_on_and_a_lower_one_that_is_there_is_refused(key: str) -> None:
    folder = runtime_dir() / key
    folder.mkdir(mode=0o700)
    with ScriptedServer(folder / "serve.sock", [answer(HEALTH)]):
        with pytest.raises(ConfigError, match=f"'full' or better, found 'landlock' at {folder}/serve.sock"):
            ensure_daemon(key, require_tier="full")
        assert not ensure_daemon(key, require_tier="landlock").started
    folder.rmdir()
    daemon = ensure_daemon(key, require_tier="rlimits")
    assert b"--require-tier\0rlimits\0" in Path(f"/proc/{daemon.pid}/cmdline").read_bytes()


def test_drain_and_undrain(key: str) -> None:
    daemon = ensure_daemon(key)
    with SandboxClient(unix_socket=daemon.socket, retries=0) as client:
        for _ in range(2):  # a second time does no harm
            assert client.drain()["status"] == "draining"
        assert client.health()["status"] == "draining"
        with pytest.raises(SandboxDraining):
            client.exec_once("python", code="1")
        with pytest.raises(SandboxDraining):
            list(client.exec_batch("python", [{"code": "1"}]))
        assert client.undrain()["status"] == "ok"
        assert client.exec_once("python", code="print(1)")["stdout"] == "1\n"


@pytest.fixture
def local(key: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The key that connect() uses, made one of this test's own."""
    monkeypatch.setattr(connect_module, "LOCAL_KEY", key)
    return key


def test_connect_ends_at_the_embedded_daemon(local: str) -> None:
    with connect(timeout=60) as client:
        assert client.address == str(runtime_dir() / local / "serve.sock")
        assert client.exec_once("python", code="print(1 + 1)")["stdout"] == "2\n"
        with connect() as other:
            assert other.health()["pid"] == client.health()["pid"]


def test_lease_is_renewed_while_the_client_lives(local: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[str, str]] = []
    real = SandboxClient._call

    def recorded(self: SandboxClient, method: str, path: str, *args: Any, **kwargs: Any) -> Any:
        sent.append((method, path))
        return real(self, method, path, *args, **kwargs)

    monkeypatch.setattr(SandboxClient, "_call", recorded)
    monkeypatch.setattr(connect_module, "RENEW_S", 0.02)
    client = connect()
    until(lambda: len([1 for method, path in sent if "/v1/owners/client-" in path]) >= 3)
    client.close()
    assert sent[-1][0] == "DELETE"
    count = len(sent)
    client.close()
    assert len(sent) == count
    # one that is forgotten gives up its lease too
    client = connect()
    del client
    gc.collect()
    assert sent[-1][0] == "DELETE"
