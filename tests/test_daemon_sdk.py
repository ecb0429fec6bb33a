"""The published SDK drives our daemon: client, sandbox, grading."""

import os

import pytest
from daemon_harness import Daemon, commands_below

collimate_rl = pytest.importorskip("collimate_rl")


@pytest.fixture(scope="module", params=["unix", "tcp"])
def served(request, tmp_path_factory):
    path = str(tmp_path_factory.mktemp("d") / "serve.sock")
    config = {"socket": path} if request.param == "unix" else {"host": "127.0.0.1", "port": 0}
    with Daemon(slots=4, **config) as daemon:
        client = collimate_rl.CollimateClient(unix_socket=path) if request.param == "unix" else None
        yield daemon, client or collimate_rl.CollimateClient(daemon.ready["url"])
        daemon.stop()


def test_client(served):
    _, client = served
    assert {"python", "py"} <= set(client.templates())
    answer = client.exec_once("py", code="print(6 * 7)", seed="0" * 64)
    assert (answer["stdout"], answer["exit_code"], answer["seed"]) == ("42\n", 0, "0" * 64)
    with pytest.raises(collimate_rl.CollimateError) as caught:
        client.exec_once("other", command="true")
    assert caught.value.error_code == "no_template"
    assert client.list_sessions() == []


def test_sandbox_moves_bytes_exactly(served):
    daemon, client = served
    data = os.urandom(1 << 20)
    with collimate_rl.Sandbox("py", client=client) as sandbox:
        for path in ("/tmp/deep/er/blob.bin", "blob.bin"):
            sandbox.upload_bytes(path, data)
            assert sandbox.download(path) == data
        assert sandbox.exec(command="echo $((6 * 7))").stdout == "42\n"
        assert sandbox.exec(command="sleep 5", timeout_seconds=1).exit_code == -1
        assert sandbox.exec(code="import os; print(os.path.getsize('blob.bin'))").stdout == f"{1 << 20}\n"
        again = collimate_rl.Sandbox.attach(client, sandbox.session_id)
        assert again.exec(command="wc -c < blob.bin").stdout.strip() == str(1 << 20)
    assert client.list_sessions() == []
    assert commands_below(daemon.pid) == set()


def test_grade_batch(served):
    _, client = served
    spec = collimate_rl.UnitTestReward(tests=[{"input": [2, 3], "expected": 5}, {"input": [0, 0], "expected": 0}])
    candidates = [
        "def solve(a, b): return a + b",
        "def solve(a, b): return 5",
        "def solve(a, b): return 1 / 0",
        "while True: pass",
    ]
    results = collimate_rl.grade_batch(client, "py", candidates, spec, timeout_seconds=3, concurrency=4)
    assert [result.reward for result in results] == [1.0, 0.5, 0.0, 0.0]
