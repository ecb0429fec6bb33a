"""What an exec does and how it ends, on a real daemon."""

import base64
import os
import time
import uuid

import pytest
from daemon_harness import Daemon, commands_below, processes_with

ROOT = os.getuid() == 0


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    with Daemon(socket=str(tmp_path_factory.mktemp("d") / "own" / "serve.sock"), slots=4) as running:
        yield running
        running.stop()


@pytest.fixture(autouse=True)
def _nothing_left(daemon):
    yield
    assert commands_below(daemon.pid) == set()


def test_code_runs_as_main_and_is_seeded(daemon):
    body = {"code": "import random, sys\nprint(__name__, sys.argv, random.random())", "seed": "ab" * 32}
    first, second = daemon.run(**body), daemon.run(**body)
    assert first["stdout"].startswith("__main__ ['-c'] 0.")
    assert first["stdout"] == second["stdout"]
    assert (first["seed"], first["seed_ack"], first["stderr"], first["status"]) == (
        "ab" * 32,
        "verified",
        "",
        "ok",
    )
    assert daemon.run(code="pass")["seed"] != daemon.run(code="pass")["seed"]


def test_error_shows_no_frame_of_ours(daemon):
    answer = daemon.run(code="def f():\n    1 / 0\nf()")
    assert answer["exit_code"] == 1
    assert answer["status"] == "exit"
    assert answer["stdout"].count("File ") == 2
    assert "_collimate" not in answer["stdout"]
    assert answer["stdout"].endswith("ZeroDivisionError: division by zero\n")


def test_streams_share_one_pipe_in_order(daemon):
    answer = daemon.run(command="for i in 1 2 3; do echo o$i; echo e$i >&2; done")
    assert answer["stdout"] == "o1\ne1\no2\ne2\no3\ne3\n"
    assert answer["stderr"] == ""


def test_command_wins_over_commands_over_code(daemon):
    assert daemon.run(command="echo c", commands=[["echo", "s"]], code="print('p')")["stdout"] == "c\n"
    answer = daemon.run(commands=[["echo", "a  b$HOME"], ["sh", "-c", "exit 3"]], code="print('p')")
    assert (answer["stdout"], answer["exit_code"], answer["status"]) == ("a  b$HOME\n", 3, "exit")


def test_files_are_written_with_parents_and_final_newline(daemon):
    files = [
        {"path": "a/b.txt", "content": "x"},
        {"path": "e", "content": ""},
        {"path": "s", "content": "\ud800"},
    ]
    answer = daemon.run(command="od -c a/b.txt; wc -c < e; wc -c < s", files=files)
    assert answer["stdout"].split() == ["0000000", "x", "\\n", "0000002", "0", "4"]
    assert "can't be written" in daemon.run(command="true", files=[{"path": "/proc/x", "content": ""}])["stdout"]


def test_stdin_larger_than_a_pipe_while_output_flows(daemon):
    data = os.urandom(3_000_000)
    answer = daemon.run(command="base64 -w0", stdin_b64=base64.b64encode(data).decode())
    assert base64.b64decode(answer["stdout"]) == data
    assert daemon.run(command="cat")["stdout"] == ""
    assert daemon.run(command="exec 0<&-; echo x", stdin_b64=base64.b64encode(data).decode())["stdout"] == "x\n"


def test_flood_is_capped(daemon):
    answer = daemon.run(command="head -c 100000000 /dev/zero | tr '\\0' x")
    assert (answer["status"], answer["exit_code"], len(answer["stdout"])) == ("output", 137, 16 << 20)
    answer = daemon.run(command="head -c 3000000 /dev/zero", limits={"output_mib": 1})
    assert (answer["status"], len(answer["stdout"])) == ("output", 1 << 20)


def test_invalid_utf8_is_replaced(daemon):
    assert daemon.run(command="printf 'a\\377b'")["stdout"] == "a\ufffdb"


def test_timeout_kills_the_stubborn_and_all_their_children(daemon):
    tag = f"{uuid.uuid4()}"
    grandchild = f'trap "" TERM; while :; do sleep 1; done; : {tag}'
    script = f"trap '' TERM; (setsid sh -c '{grandchild}' &) ; echo before; while :; do :; done"
    answer = daemon.run(command=script, timeout_seconds=1)
    assert (answer["exit_code"], answer["status"]) == (-1, "timeout")
    assert answer["stdout"] == "before\ntimeout after 1s\n"
    assert processes_with(tag) == []


def test_background_child_that_holds_the_pipe_delays_nothing(daemon):
    tag = f"{uuid.uuid4()}"
    started = time.monotonic()
    answer = daemon.run(command=f"setsid sh -c 'sleep 50; : {tag}' & (sleep 51 &) ; echo done")
    assert time.monotonic() - started < 10
    assert (answer["stdout"], answer["status"]) == ("done\n", "ok")
    assert processes_with(tag) == []


def test_child_that_wiped_its_mark_is_swept(daemon):
    tag = f"{uuid.uuid4()}"
    daemon.run(command=f"setsid env -i sh -c 'sleep 50; : {tag}' >/dev/null 2>&1 & sleep 0.2")
    assert processes_with(tag) == []


def test_signal_is_told(daemon):
    answer = daemon.run(code="import os; os.kill(os.getpid(), 11)")
    assert (answer["status"], answer["signal"], answer["exit_code"]) == ("signal", 11, 139)


def test_usage_is_told(daemon):
    answer = daemon.run(code="import time\nx = bytearray(200 << 20)\nwhile time.process_time() < 0.3: pass")
    assert answer["cpu_time_ms"] >= 250
    assert answer["max_rss_kib"] >= 200 << 10
    assert answer["exec_time_ms"] >= 250
    assert answer["isolation"] == daemon.call("GET", "/v1/health")[1]["tier"]


def test_memory_bomb_is_bounded(daemon):
    answer = daemon.run(code="x = bytearray(1 << 30)", limits={"memory_mib": 256})
    assert (answer["status"], answer["exit_code"]) == ("memory", 1)
    many = (
        "import os, time\n"
        "for _ in range(6): os.fork() or (bytearray(b'x' * (100 << 20)), time.sleep(60))\n"
        "time.sleep(60)"
    )
    answer = daemon.run(code=many, limits={"memory_mib": 256})
    assert (answer["status"], answer["exit_code"]) == ("memory", 137)


def test_cpu_limit_is_a_timeout(daemon):
    answer = daemon.run(code="while True: pass", limits={"time_s": 1})
    assert (answer["status"], answer["exit_code"]) == ("timeout", -1)


def test_wall_limit(daemon):
    assert daemon.run(command="sleep 60", limits={"wall_time_s": 0.5})["status"] == "timeout"


@pytest.mark.skipif(not ROOT, reason="without root all of a user's processes are counted together")
def test_fork_bomb_is_bounded(daemon):
    bomb = "import os, time\nn = 0\ntry:\n    while os.fork(): n += 1\n    time.sleep(60)\nexcept OSError: print(n)"
    answer = daemon.run(code=bomb, limits={"processes": 20}, timeout_seconds=20)
    assert answer["stdout"].strip() == "19"


def test_file_and_descriptor_limits(daemon):
    command = "head -c 2000000 /dev/zero > f; wc -c < f; ulimit -n"
    answer = daemon.run(command=command, limits={"file_mib": 1, "files": 77})
    assert answer["stdout"].split()[-2:] == [str(1 << 20), "77"]


def test_environment_is_clean(daemon):
    answer = daemon.run(code="import os; print(sorted(os.environ)); print(os.environ['HOME'] == os.getcwd())")
    names, home = answer["stdout"].splitlines()
    assert set(eval(names)) <= {
        "PATH", "HOME", "TMPDIR", "USER", "LANG", "PYTHONUTF8", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS",
        "MKL_NUM_THREADS", "MALLOC_ARENA_MAX", "COLLIMATE_SEED", "COLLIMATE_EXEC_ID", "LC_CTYPE", "PYTHONHASHSEED",
    }  # fmt: skip
    assert home == "True"


def test_no_descriptor_is_inherited(daemon):
    answer = daemon.run(code="import os; print(sorted(int(fd) for fd in os.listdir('/proc/self/fd')))")
    assert answer["stdout"] == "[0, 1, 2, 3]\n"  # 3 is the listing itself


@pytest.mark.skipif(not ROOT, reason="needs a uid for each session")
def test_daemon_is_out_of_reach(daemon):
    code = f"""
import os
for what in ("environ", "mem", "fd/0", "maps"):
    try: print(os.open(f"/proc/{daemon.pid}/{{what}}", os.O_RDONLY))
    except OSError as error: print("no")
try: os.kill({daemon.pid}, 0)
except OSError: print("no")
try: print(os.listdir({os.path.dirname(daemon.ready["socket"])!r} + "/serve.sock.d"))
except OSError: print("no")
"""
    out = daemon.run(code=code)["stdout"].splitlines()
    assert out[:5] == ["no"] * 5
    assert "lib" not in out[5]


@pytest.mark.skipif(not ROOT, reason="needs private mounts")
def test_tmp_is_private_to_a_session_and_kept_in_it(daemon):
    if "private-tmp" not in daemon.call("GET", "/v1/health")[1]["isolation"]:
        pytest.skip("this kernel grants no mount namespace")
    name = f"private-{uuid.uuid4()}"
    one, two = (daemon.call("POST", "/v1/sessions", {"template_id": "py"})[1]["session_id"] for _ in "12")

    def run(session, command):
        return daemon.call("POST", f"/v1/sessions/{session}/exec", {"command": command})[1]["stdout"]

    paths = " ".join(f"{top}/{name}" for top in ("/tmp", "/var/tmp", "/dev/shm"))
    assert run(one, f"for p in {paths}; do echo x > $p; done; id -u") != run(two, "id -u")
    assert run(one, f"ls {paths} | wc -l") == "3\n"
    assert run(two, f"ls {paths} 2>/dev/null | wc -l") == "0\n"
    assert not os.path.exists(f"/tmp/{name}")
    for session in (one, two):
        assert daemon.call("DELETE", f"/v1/sessions/{session}")[1]["deleted"]


def test_links_of_a_session_do_not_lead_its_files_out(daemon, tmp_path):
    target = tmp_path / "target"
    target.mkdir(mode=0o755)
    session = daemon.call("POST", "/v1/sessions", {"template_id": "py"})[1]["session_id"]
    path = f"/v1/sessions/{session}/exec"
    daemon.call("POST", path, {"command": "ln -s /etc link"})
    daemon.call("POST", path, {"command": "true", "files": [{"path": "link/collimate-test", "content": "x"}]})
    call = "import collimate_runner; collimate_runner.main()"
    daemon.call("POST", path, {"code": call, "files": [{"path": "link/collimate-test", "content": "x"}]})
    assert not os.path.exists("/etc/collimate-test") or not ROOT
    daemon.call("DELETE", f"/v1/sessions/{session}")


def test_runner_is_preloaded_and_gets_stdin(daemon):
    call = "import collimate_runner; collimate_runner.main()"
    words = daemon.run(code=call, stdin_b64=base64.b64encode(b"hello").decode())["stdout"].split()
    assert (words[0], words[3]) == ("runner", "hello")
    if ROOT:
        assert words[1] == "0"
        assert words[2] != "None"


def test_deep_and_locked_trees_are_removed(daemon):
    code = "import os\nfor i in range(3000):\n    os.mkdir('d'); os.chdir('d')\nos.chmod('.', 0)"
    assert daemon.run(code=code)["exit_code"] == 0
    root = os.path.join(os.path.dirname(daemon.ready["socket"]), "serve.sock.d")
    end = time.monotonic() + 20
    while os.listdir(f"{root}/w") + os.listdir(f"{root}/gone"):
        assert time.monotonic() < end
        time.sleep(0.02)


def test_long_command_is_one_clear_line(daemon):
    answer = daemon.run(command=": " + "x" * 140_000)
    assert answer["stdout"] == "collimate: sh: Argument list too long\n"


def test_system_v_objects_are_refused(daemon):
    answer = daemon.run(code="import ctypes\nprint(ctypes.CDLL(None).shmget(0, 4096, 0o1600) >= 0)")
    assert answer["stdout"] == "False\n"
