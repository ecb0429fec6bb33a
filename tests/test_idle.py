"""Execs beside an idle first process, which shares the zygote's memory: neither the first, nor through it the zygote,
is within an exec's reach; whose end an exec's was is told truly."""

import os
import re
import signal
import uuid
from pathlib import Path

import pytest
from daemon_harness import Daemon, processes_with

from collimate_ray.jail.process import child_pids
from collimate_ray.sandbox.wire import ErrorCode

pytestmark = [
    pytest.mark.skipif(os.getuid() != 0, reason="only root owns the pid namespaces that it makes"),
    pytest.mark.skipif(os.uname().machine != "x86_64", reason="the idle process has no code for this machine"),
]
#: For hangs only, s.
LONG_S = 60
#: At an exec's end it says what it reached, and nothing if it did not come to its end.
REACH = """
import ctypes, fcntl, os, resource, signal, socket, sys
libc, reached = ctypes.CDLL(None, use_errno=True), []
def attempt(name, do, *arguments):
    try:
        if do(*arguments) not in (-1, None): reached.append(name)
    except OSError: pass
{attempts}
print(os.getpid() != 1, *reached)
"""
ATTEMPTS = {
    "signals": "for number in signal.valid_signals(): attempt(number, lambda: os.kill(1, number) or 1)",
    "groups": "attempt('getpgid', lambda: os.kill(-os.getpgid(1), 9) if os.getpgid(1) else None)",
    "memory": "attempt('mem', os.open, '/proc/1/mem', 2); attempt('maps', lambda: open('/proc/1/maps').read() or None)",
    "environment": "attempt('environ', lambda: open('/proc/1/environ').read() or None)",
    "descriptors": "attempt('fd', os.listdir, '/proc/1/fd'); attempt('root', os.listdir, '/proc/1/root/')",
    "clear_refs": "attempt('clear_refs', os.open, '/proc/1/clear_refs', 1)",
    "oom": "attempt('oom', os.open, '/proc/1/oom_score_adj', 1); attempt('score', os.open, '/proc/1/oom_adj', 1)",
    "limits": "attempt('prlimit', lambda: resource.prlimit(1, resource.RLIMIT_AS, (1, 1)) or 1)",
    "niceness": "attempt('nice', lambda: os.setpriority(os.PRIO_PROCESS, 1, 19) or 1)",
    "affinity": "attempt('affinity', lambda: os.sched_setaffinity(1, [0]) or 1)",
    "trace": "attempt('ptrace', libc.ptrace, 16, 1, 0, 0); attempt('seize', libc.ptrace, 0x4206, 1, 0, 0)",
    "futexes": "attempt('robust', lambda: 1 if libc.syscall(274, 1, ctypes.byref(ctypes.c_void_p()), "
    "ctypes.byref(ctypes.c_size_t())) == 0 else None)",
    # the kernel's own signals would end even a first process
    "owner": """
a, b = socket.socketpair()
attempt('F_SETSIG', lambda: fcntl.fcntl(a, 10, 9) or 1)
attempt('F_SETOWN', lambda: fcntl.fcntl(a, 8, 1) or 1)
attempt('O_ASYNC', lambda: fcntl.ioctl(a, 0x8901, b'\\1\\0\\0\\0') and 1)
b.send(b'x')""",
    "strict": "attempt('strict', libc.prctl, 22, 1, 0, 0, 0)",
}


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    with Daemon(socket=str(tmp_path_factory.mktemp("d") / "serve.sock"), slots=2) as it:
        yield it


def test_first_process_is_out_of_reach(daemon):
    for name, attempts in ATTEMPTS.items():
        answer = daemon.run(code=REACH.format(attempts=attempts))
        assert answer["stdout"] == "True\n", (name, answer)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM])
def test_own_signals_end_the_exec_alone(daemon, number):
    answer = daemon.run(code=f"import os; os.kill(os.getpid(), {number:d})")
    assert (answer["status"], answer["exit_code"]) == ("signal", 128 + number)


def test_signal_to_all_finds_nobody(daemon):
    assert daemon.run(code="import os; os.kill(-1, 9)")["stdout"].endswith(
        "ProcessLookupError: [Errno 3] No such process\n"
    )


def test_orphans_are_reaped_and_end_with_the_exec(daemon):
    tag = f"{uuid.uuid4()}"
    orphans = """
import os, subprocess, time
for _ in range(50):
    if os.fork() == 0:
        if os.fork() == 0: os._exit(0)
        os._exit(0)
    os.wait()
def state(pid): return open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0]
while "Z" in {state(pid) for pid in os.listdir("/proc") if pid.isdigit()}: time.sleep(0.01)
"""
    left = f"\nsubprocess.Popen(['sh', '-c', 'setsid sleep 600 & : {tag}; sleep 600'], start_new_session=True)"
    assert daemon.run(code=orphans + left)["status"] == "ok"
    assert processes_with(tag) == []


def firsts(daemon):
    """Give the first processes of sessions for one exec, and the exec's process of each."""
    found = {}
    for zygote in child_pids(daemon.pid):
        for pid in child_pids(zygote):
            found.setdefault(os.readlink(f"/proc/{pid}/ns/pid_for_children"), []).append(pid)
    return {first: main for pids in found.values() if len(pids) == 2 for first, main in [sorted(pids)]}


def running(daemon, tag):
    """Start an exec that waits; give its thread, its first process and its own."""
    thread = daemon.background(code=f"import time  # {tag}\nopen('/tmp/{tag}', 'w'); time.sleep(600)")
    daemon.until(lambda health: health["running"] == 1, "running", LONG_S)
    while True:
        for first, main in firsts(daemon).items():
            if Path(f"/proc/{main}/root/tmp/{tag}").exists():
                return thread, first, main


@pytest.mark.parametrize("victim", ["first", "exec"])
def test_end_from_outside_is_told(daemon, victim):
    thread, first, main = running(daemon, f"{uuid.uuid4()}")
    os.kill(first if victim == "first" else main, signal.SIGKILL)
    thread.join(LONG_S)
    status, answer = thread.answer
    if victim == "first":
        assert (status, answer["error_code"]) == (410, ErrorCode.SESSION_GONE)
    else:  # who killed it can't be seen: its own user may
        assert (status, answer["status"]) == (200, "signal")
    assert not Path(f"/proc/{first}").exists()


def test_first_process_ends_with_its_zygote(tmp_path):
    with Daemon(socket=str(tmp_path / "serve.sock"), slots=2) as daemon:
        thread, first, _ = running(daemon, f"{uuid.uuid4()}")
        stat = Path(f"/proc/{first}/stat").read_text()
        zygote = int(stat.rpartition(")")[2].split()[1])
        os.kill(zygote, signal.SIGKILL)
        thread.join(LONG_S)
        assert thread.answer[1]["error_code"] == ErrorCode.ZYGOTE_LOST
        daemon.until(lambda health: not Path(f"/proc/{first}").exists(), "dead", LONG_S)
        daemon.stop()


def test_nothing_of_the_zygote_comes_along(daemon):
    code = "import os; print(sorted(os.listdir('/proc/self/fd'))); print(open('/proc/1/status').read())"
    answer = daemon.run(code=code)["stdout"]
    assert answer.startswith("['0', '1', '2', '3']\n")  # the last is that of the listing
    assert re.search(r"^Uid:\t(\d+)\t", answer, re.MULTILINE)
