"""Cgroups: version 1 for real where this machine lets us make groups, version 2 on a recorded tree of plain files."""

import errno
import os
import select
import shutil
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from collimate_ray.daemon import cgroups
from collimate_ray.daemon.cgroups import Cgroups, CgroupsUnusable

V2_FILES = ("cgroup.procs", "cgroup.kill", "memory.max", "memory.swap.max", "memory.events", "pids.max", "cpu.weight")


def why_not():
    """Say why version 1 can't be tested here, or nothing."""
    try:
        with closing(Cgroups.open(f"probe-{os.getpid()}")) as found:
            return "" if found.parts[0].startswith("cgroup1-") else "this machine has version 2"
    except CgroupsUnusable as error:
        return str(error)


REASON = why_not()
real = pytest.mark.skipif(REASON != "", reason=REASON)


@pytest.fixture
def opened():
    found = Cgroups.open(f"test-{os.getpid()}")
    yield found
    found.close()
    assert not left_of(f"collimate-test-{os.getpid()}")


def left_of(name):
    return [where for where, names, _ in os.walk("/sys/fs/cgroup") if name in names]


def start_in(group, code, **options):
    """Start a program whose process joins first, as an exec's does."""
    joins = f"import os\nfor fd in {group.join_fds}: os.write(fd, b'0'); os.close(fd)\n"
    command = [sys.executable, "-I", "-S", "-c", joins + code]
    return subprocess.Popen(command, pass_fds=group.join_fds, stdout=subprocess.PIPE, text=True, **options)


def run_in(group, code):
    process = start_in(group, code)
    out, _ = process.communicate(timeout=120)
    return process.returncode, out


@real
def test_memory_is_bounded_and_the_kill_is_counted(opened):
    group = opened.group(1)
    group.set(64, 10)
    assert run_in(group, "bytearray(40 << 20)") == (0, "")
    assert group.oom_kills() == 0
    assert run_in(group, "bytearray(100 << 20)") == (-signal.SIGKILL, "")
    assert group.oom_kills() == 1


@real
def test_memory_is_that_of_all_processes_together(opened):
    group = opened.group(1)
    group.set(64, 10)
    # one after the other has its 40 MiB: whoever is killed, not both lived
    code = (
        "r, w = os.pipe()\npid = os.fork()\n"
        "if pid == 0: kept = bytearray(40 << 20); os.write(w, b'x'); os.close(w); import time; time.sleep(600)\n"
        "os.close(w); os.read(r, 1); kept = bytearray(40 << 20); os.kill(pid, 9)"
    )
    run_in(group, code)
    assert group.oom_kills() >= 1
    group.kill()


@real
def test_processes_are_bounded(opened):
    group = opened.group(1)
    group.set(64, 3)
    code = (
        "import signal\nmade = []\n"
        "try:\n"
        "    while True:\n"
        "        pid = os.fork()\n"
        "        if pid == 0: signal.pause()\n"
        "        made.append(pid)\n"
        "except BlockingIOError: print(len(made))\n"
        "for pid in made: os.kill(pid, 9)"
    )
    assert run_in(group, code) == (0, "2\n")


@real
def test_limits_go_up_and_down_and_a_dead_session_counts_no_more(opened):
    group = opened.group(1)
    for memory_mib in (16, 256, 64, 64, 512):
        group.set(memory_mib, 10)
        assert run_in(group, f"bytearray({memory_mib // 2} << 20)") == (0, "")
    group.set(16, 10)
    assert group.oom_kills() == 0
    assert run_in(group, "bytearray(24 << 20)") == (-signal.SIGKILL, "")


@real
def test_a_limit_below_what_is_held_is_refused_and_set_again_later(opened):
    group = opened.group(1)
    group.set(64, 10)
    process = start_in(group, "kept = bytearray(32 << 20); print(1, flush=True); input()", stdin=subprocess.PIPE)
    assert process.stdout.readline() == "1\n"
    with pytest.raises(OSError, match="busy"):
        group.set(16, 10)
    group.set(64, 10)
    process.communicate("\n", timeout=120)
    assert process.returncode == 0
    group.set(16, 10)
    assert run_in(group, "bytearray(24 << 20)") == (-signal.SIGKILL, "")


@real
def test_kill_outruns_a_fork_bomb_and_the_group_serves_again(opened):
    group = opened.group(1)
    group.set(256, 60)
    bomb = (
        "print(1, flush=True)\n"
        "while True:\n    try:\n        if os.fork() == 0: os.setsid()\n    except BlockingIOError: pass\n"
    )
    process = start_in(group, bomb)
    assert process.stdout.readline() == "1\n"
    group.kill()
    # all hold the pipe: its end tells that all are gone
    assert process.stdout.read() == ""
    process.wait()
    group.set(256, 60)
    assert run_in(group, "if os.fork(): print(os.waitstatus_to_exitcode(os.wait()[1]))") == (0, "0\n")


@real
def test_a_slot_keeps_its_group_and_sessions_yield_the_processor(opened):
    assert opened.group(3) is opened.group(3)
    assert opened.group(3).join_fds != opened.group(4).join_fds
    assert len(opened.group(3).join_fds) <= 12
    if "cgroup1-cpu" in opened.parts:
        shares = [
            Path(where, f"collimate-test-{os.getpid()}/cpu.shares")
            for where in left_of(f"collimate-test-{os.getpid()}")
        ]
        assert [path.read_text() for path in shares if path.exists()] == ["64\n"]


@real
def test_close_takes_running_processes_along():
    found = Cgroups.open(f"close-{os.getpid()}")
    found.group(1).set(64, 10)
    process = start_in(found.group(1), "print(1, flush=True); import signal; signal.pause()")
    process.stdout.readline()
    descriptors = len(os.listdir("/proc/self/fd"))
    found.close()
    assert process.wait(timeout=60) == -signal.SIGKILL
    assert len(os.listdir("/proc/self/fd")) < descriptors
    assert not left_of(f"collimate-close-{os.getpid()}")


@real
def test_what_a_dead_daemon_left_is_swept_and_a_living_one_is_left_alone(opened):
    opened.group(1).set(64, 10)
    living = start_in(opened.group(1), "print(1, flush=True); input()", stdin=subprocess.PIPE)
    living.stdout.readline()
    dead = (
        "import os, subprocess, sys\n"
        "from collimate_ray.daemon.cgroups import Cgroups\n"
        f"group = Cgroups.open('dead-{os.getpid()}').group(1)\n"
        "group.set(64, 10)\n"
        "code = 'import os, signal\\nfor fd in map(int, os.sys.argv[1:]): os.write(fd, b\"0\")\\n'\n"
        "code += 'print(os.getpid(), flush=True)\\nsignal.pause()'\n"
        "command = [sys.executable, '-I', '-c', code, *map(str, group.join_fds)]\n"
        "left = subprocess.Popen(command, pass_fds=group.join_fds, stdout=subprocess.PIPE)\n"
        "print(left.stdout.readline().decode(), flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    pid = int(subprocess.run([sys.executable, "-c", dead], stdout=subprocess.PIPE, timeout=120).stdout)
    pidfd = os.pidfd_open(pid)
    assert left_of(f"collimate-dead-{os.getpid()}")
    Cgroups.open(f"next-{os.getpid()}").close()
    assert not left_of(f"collimate-dead-{os.getpid()}")
    assert select.select([pidfd], [], [], 60)[0]  # it ended, whether or not somebody has reaped it
    os.close(pidfd)
    assert living.communicate("\n", timeout=120) == ("", None)
    assert living.returncode == 0


def test_v2_a_group_of_the_kernel_is_emptied_and_removed():
    mounts = [mount.at for mount in cgroups._mounts(Path("/")) if "cgroup2" in mount.options]
    if not mounts or not os.access(mounts[0], os.W_OK):
        pytest.skip("this machine gives no group of version 2")
    top = mounts[0] / f"collimate-v2-{os.getpid()}"
    (top / "1").mkdir(parents=True)
    code = f"open('{top}/1/cgroup.procs', 'w').write('0'); print(1, flush=True); import signal; signal.pause()"
    process = subprocess.Popen([sys.executable, "-I", "-S", "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "1\n"
    cgroups._remove(top)
    assert process.wait(timeout=60) == -signal.SIGKILL
    assert not top.exists()


class Recorded:
    """A file tree as version 2 shows it: plain files, filled and taken away as the kernel does."""

    def __init__(self, root, monkeypatch, own="/user.slice/run.scope"):
        self.root, self.mount = root, root / "sys/fs/cgroup"
        (root / "proc/self").mkdir(parents=True)
        (root / "proc/self/cgroup").write_text(f"0::{own}\n")
        (root / "proc/self/mountinfo").write_text(
            "25 1 0:22 / /proc rw - proc proc rw\n"
            "30 25 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
        )
        self.mount.mkdir(parents=True)
        self.own = self.mount / own.lstrip("/")
        for path in reversed([self.own, *self.own.relative_to(self.mount).parents][:-1]):
            (self.mount / path).mkdir()
        for path in (self.mount, *(path for path in self.mount.rglob("*") if path.is_dir())):
            self.fill(path)
        monkeypatch.setattr(cgroups, "_make_dir", self.make)
        monkeypatch.setattr(cgroups, "_remove_dir", shutil.rmtree)

    def fill(self, path, controllers="cpu memory pids", given=""):
        for name in V2_FILES:
            (path / name).touch()
        for name in ("memory.max", "pids.max"):
            (path / name).write_text("max\n")
        (path / "cgroup.controllers").write_text(f"{controllers}\n")
        (path / "cgroup.subtree_control").write_text(given)
        (path / "memory.events").write_text("low 0\nhigh 0\nmax 12\noom 4\noom_kill 3\noom_group_kill 0\n")

    def make(self, path):
        os.mkdir(path)
        self.fill(path)
        for name in ("memory.max", "pids.max", "cgroup.subtree_control"):
            (path / name).write_text("")

    def open(self):
        return Cgroups.open("name", self.root)


@pytest.fixture
def recorded(tmp_path, monkeypatch):
    return Recorded(tmp_path, monkeypatch)


def test_v2_a_daemon_alone_in_its_group_moves_into_a_leaf(recorded):
    (recorded.own / "cgroup.procs").write_text(f"{os.getpid()}\n")
    with closing(recorded.open()) as found:
        top = recorded.own / "collimate-name"
        assert found.parts == ("cgroup2-memory", "cgroup2-cpu", "cgroup2-pids")
        assert (recorded.own / "daemon/cgroup.procs").read_text() == "0"
        assert (recorded.own / "cgroup.subtree_control").read_text() == "+memory +cpu +pids"
    assert not top.exists()


def test_v2_what_is_written(recorded):
    (recorded.own / "cgroup.subtree_control").write_text("memory pids cpu\n")
    with closing(recorded.open()) as found:
        top = recorded.own / "collimate-name"
        assert (top / "cgroup.subtree_control").read_text() == "+memory +cpu +pids"
        assert (top / "cpu.weight").read_text() == "6"
        group = found.group(7)
        group.set(100, 12)
        written = {name: (top / "7" / name).read_text() for name in ("memory.max", "memory.swap.max", "pids.max")}
        assert written == {"memory.max": str(100 << 20), "memory.swap.max": "0", "pids.max": "12"}
        assert group.oom_kills() == 3
        assert len(group.join_fds) == 1
        os.write(group.join_fds[0], b"0")
        assert (top / "7/cgroup.procs").read_text() == "0"
        group.kill()
        assert (top / "7/cgroup.kill").read_text() == "1"
        (top / "7/cgroup.procs").write_text("")
        found.group(8).kill()
        assert (top / "8/pids.max").read_text() == "0"  # no fork outruns the kill
    assert not top.exists()


def test_v2_what_stands_is_not_written_again(recorded):
    (recorded.own / "cgroup.subtree_control").write_text("memory pids\n")
    with closing(recorded.open()) as found:
        group = found.group(7)
        group.set(100, 12)
        limit = recorded.own / "collimate-name/7/memory.max"
        limit.write_text("untouched")
        group.set(100, 12)
        assert limit.read_text() == "untouched"
        assert found.parts == ("cgroup2-memory", "cgroup2-pids")  # no share of the processor where it is not given


def test_v2_beside_a_group_with_others_only_if_that_evades_no_limit(recorded):
    (recorded.own / "cgroup.procs").write_text(f"1\n{os.getpid()}\n")
    (recorded.own.parent / "cgroup.subtree_control").write_text("memory pids\n")
    with closing(recorded.open()):
        assert (recorded.own.parent / "collimate-name").is_dir()
    (recorded.own / "memory.max").write_text("1073741824\n")
    with pytest.raises(CgroupsUnusable, match=r"with other processes in it.*Delegate=yes"):
        recorded.open()
    assert not (recorded.own / "daemon").exists()  # nothing was moved


def test_v2_leftovers_go_and_the_living_stay(recorded, monkeypatch):
    (recorded.own / "cgroup.subtree_control").write_text("memory pids\n")
    left = recorded.mount / "user.slice/collimate-left"
    recorded.make(left)
    recorded.make(left / "1")
    with closing(recorded.open()):
        assert not left.exists()
        monkeypatch.setattr(cgroups, "_GONE_S", 0.01)
        with pytest.raises(CgroupsUnusable, match="Device or resource busy"):
            recorded.open()
        assert (recorded.own / "collimate-name/0").is_dir()


def test_v2_no_controllers(recorded):
    recorded.fill(recorded.own, controllers="cpu pids")
    with pytest.raises(CgroupsUnusable, match=r"expected the memory controller in .*run.scope, found cpu, pids"):
        recorded.open()


@pytest.mark.parametrize(
    ("own", "mounts", "why"),
    [
        ("0::/\n", "", "expected that cgroup2 is mounted"),
        ("4:memory:/a\n0::/\n", "", "expected that the memory controller is mounted"),
        (
            "4:memory:/a\n3:pids:/a\n",
            "1 1 0:1 /b /m rw - cgroup x rw,memory\n",
            "our own group /a at .*/m, found /b there",
        ),
        (None, "", "No such file or directory"),
    ],
)
def test_why_there_are_none(tmp_path, own, mounts, why):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/mountinfo").write_text(mounts)
    if own is not None:
        (tmp_path / "proc/self/cgroup").write_text(own)
    with pytest.raises(CgroupsUnusable, match=why) as caught:
        Cgroups.open("name", tmp_path)
    assert "\n" not in str(caught.value)


def test_a_place_that_can_not_be_written_is_told(recorded, monkeypatch):
    (recorded.own / "cgroup.subtree_control").write_text("memory pids\n")

    def refuse(path):
        raise OSError(errno.EACCES, "", str(path))

    monkeypatch.setattr(cgroups, "_make_dir", refuse)
    with pytest.raises(CgroupsUnusable, match="collimate-name: Permission denied"):
        recorded.open()
