"""Our client drives a real peer: the published SDK's local backend, and the embedded daemon on a unix socket."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
from collimate_rl.local_backend import LocalCollimateBackend

from collimate_ray.errors import ConfigError, SessionLost, WireError
from collimate_ray.sandbox import SandboxClient, files
from collimate_ray.sandbox.wire import MAX_OUTPUT_BYTES
from collimate_ray.seeds import seed_from_key

SEED = seed_from_key("interop")


@pytest.fixture(scope="session")
def local_backend() -> Iterator[LocalCollimateBackend]:
    with LocalCollimateBackend() as backend:
        yield backend


@pytest.fixture(scope="session", params=["sdk", "embedded"])
def where(request: pytest.FixtureRequest) -> dict[str, Any]:
    if request.param == "sdk":
        return {"base_url": request.getfixturevalue("local_backend").base_url}
    return {"unix_socket": request.getfixturevalue("daemon").socket}


@pytest.fixture
def client(where: dict[str, Any]) -> Iterator[SandboxClient]:
    with SandboxClient(**where) as client:
        yield client


@pytest.fixture
def session(client: SandboxClient) -> Iterator[str]:
    session_id = client.create_session("py")["session_id"]
    yield session_id
    client.delete_session(session_id)


def test_health(client: SandboxClient) -> None:
    assert client.health()["status"] == "ok"
    assert "py" in client.templates()


def test_exec_once(client: SandboxClient) -> None:
    answer = client.exec_once("py", code="import sys; print('out'); sys.exit(3)", seed=SEED)
    assert (answer["stdout"], answer["exit_code"], answer["seed"]) == ("out\n", 3, SEED)
    assert client.exec_once("py", command="echo a; echo b >&2")["stdout"] == "a\nb\n"
    assert len(client.exec_once("py", command="true")["seed"]) == 64


def test_command_wins_over_code(client: SandboxClient) -> None:
    assert client.exec_once("py", command="echo command", code="print('code')")["stdout"] == "command\n"


def test_time_out_is_an_answer(client: SandboxClient, session: str) -> None:
    answer = client.session_exec(session, command="exec sleep 30", timeout_seconds=1)
    assert answer["exit_code"] == -1
    assert "timeout" in answer["stdout"]
    assert client.session_exec(session, command="echo alive")["stdout"] == "alive\n"


def test_life_of_a_session(client: SandboxClient) -> None:
    made = client.create_session("py")
    session_id = made["session_id"]
    assert made["template_id"] == client.get_session(session_id)["template_id"] == "py"
    assert session_id in [listed["session_id"] for listed in client.list_sessions()]
    assert client.session_exec(session_id, code="print(6 * 7)")["stdout"] == "42\n"
    assert client.delete_session(session_id) == {"deleted": True, "session_id": session_id}
    assert client.delete_session(session_id)["deleted"] is False
    with pytest.raises(SessionLost):
        client.session_exec(session_id, command="true")
    with pytest.raises(SessionLost):
        client.get_session(session_id)


def test_unknown_template(client: SandboxClient) -> None:
    with pytest.raises(ConfigError, match=r"template: expected one of .*py.*, found 'nope'"):
        client.exec_once("nope", command="true")
    with pytest.raises(ConfigError, match="found 'nope'"):
        client.create_session("nope")


def test_cancel_of_what_does_not_run(client: SandboxClient) -> None:
    assert client.cancel_exec("never-was") is False


def test_files_of_an_exec(client: SandboxClient, session: str) -> None:
    folder = client.session_exec(session, command="mktemp -d")["stdout"].strip()
    written = [{"path": f"{folder}/deep/er/a.txt", "content": "text é\n"}]
    answer = client.session_exec(session, command=f"cat {folder}/deep/er/a.txt; rm -r {folder}", files=written)
    assert answer["stdout"] == "text é\n"


@pytest.mark.parametrize("size", [0, 1, files.UPLOAD_CHUNK_BYTES, (1 << 20) + 3])
def test_bytes_go_in_and_out_whole(client: SandboxClient, session: str, size: int) -> None:
    folder = client.session_exec(session, command="mktemp -d")["stdout"].strip()
    path = f'{folder}/new folder/it\'s -a "name".bin'
    data = os.urandom(size)
    files.upload(client, session, path, b"old")
    files.upload(client, session, path, data)
    assert files.download(client, session, path) == data
    listed = client.session_exec(session, command=f"ls -A '{folder}/new folder' | wc -l; rm -r {folder}")
    assert listed["stdout"].strip() == "1"


def test_download_of_nothing(client: SandboxClient, session: str) -> None:
    for path in ("/no/such/file", "/", ""):
        with pytest.raises(ConfigError, match="path: expected"):
            files.download(client, session, path)


def test_upload_to_where_nothing_can_be_written(client: SandboxClient, session: str) -> None:
    with pytest.raises(WireError, match="exit code"):
        files.upload(client, session, "/proc/none/file", b"x")


def test_worst_output_is_an_answer(daemon: Any) -> None:
    """Control characters are six characters each in JSON: a candidate must not make an infra error of its flood."""
    with SandboxClient(unix_socket=daemon.socket) as client:
        answer = client.exec_once("py", command="head -c 20000000 /dev/zero")
    assert set(answer["stdout"]) == {"\0"}
    assert len(answer["stdout"]) == MAX_OUTPUT_BYTES
