"""The fence's system calls, each in a process of its own."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from collimate_ray.jail import process as jail

ROOT = os.getuid() == 0
SOURCE = Path(jail.__file__)


def run(code, **options):
    """Run code that sees the jail's names, as the runner and the exec program do: as text."""
    program = f"import sys\nsource = {str(SOURCE)!r}\nexec(compile(open(source).read(), source, 'exec'))\n{code}"
    return subprocess.run([sys.executable, "-I", "-c", program], capture_output=True, text=True, timeout=60, **options)


def test_it_is_small_plain_text():
    text = SOURCE.read_text()
    assert len(text) < 10 * 1024
    assert len(text.splitlines()) < 300
    assert "collimate_ray" not in text
    assert "__main__" not in text


def test_limits_hold_and_are_never_raised():
    out = run(
        "set_limits(memory_mib=100, files=20, file_mib=1)\n"
        "set_limits(memory_mib=1000, files=40, file_mib=2)\n"
        "which = (resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE, resource.RLIMIT_CORE)\n"
        "print([resource.getrlimit(limit) for limit in which])\n"
        "try: bytearray(150 << 20)\n"
        "except MemoryError: print('full')\n"
    ).stdout
    assert out == f"[(20, 20), ({1 << 20}, {1 << 20}), (0, 0)]\nfull\n"


def test_sweep_ends_orphans_that_ignore_signals():
    script = (
        "import subprocess\nbecome_subreaper()\n"
        "subprocess.run(['sh', '-c', \"trap '' TERM; (setsid sleep 60 &) ; (setsid sh -c 'sleep 60 & sleep 60' &)\"])\n"
        "sweep_children()\nprint(child_pids(os.getpid()))"
    )
    assert run(script).stdout == "[]\n"


@pytest.mark.skipif(not ROOT, reason="needs a uid whose processes can be bounded")
def test_sweep_outruns_a_fork_bomb():
    script = (
        "import time\nbecome_subreaper()\nr, w = os.pipe()\n"
        "if os.fork() == 0:\n"
        "    set_limits(processes=64, own_uid=True); drop_to(345679)\n"
        "    while True:\n"
        "        try: os.fork()\n"
        "        except OSError: w and os.write(w, b'x'); w = 0\n"
        "os.read(r, 1); started = time.monotonic(); sweep_children()\n"
        "print(child_pids(os.getpid()), time.monotonic() - started < 10)"
    )
    assert run(script).stdout == "[] True\n"


def test_no_new_privs_and_dumpable():
    code = (
        "no_new_privs(); harden_keeper()\n"
        "print(_LIBC.prctl(3), [l for l in open('/proc/self/status') if 'NoNewPrivs' in l])"
    )
    assert run(code).stdout == "0 ['NoNewPrivs:\\t1\\n']\n"


def test_dies_with_its_parent():
    code = (
        "import time\nr, w = os.pipe()\nmiddle = os.fork()\n"
        "if middle == 0:\n"
        "    child = os.fork()\n"
        "    if child == 0:\n        die_with_parent(); os.write(w, b'%d ' % os.getpid()); time.sleep(60)\n"
        "    time.sleep(60)\n"
        "pid = int(os.read(r, 20)); os.kill(middle, 9); print(pid)"
    )
    pid = int(run(code).stdout)
    end = time.monotonic() + 10
    while os.path.exists(f"/proc/{pid}") and "Z" not in Path(f"/proc/{pid}/stat").read_text().split()[2]:
        assert time.monotonic() < end
        time.sleep(0.01)


needs_root = pytest.mark.skipif(not ROOT, reason="needs root")


@needs_root
def test_drop_to_a_uid_is_for_good():
    out = run(
        "set_limits(processes=5, own_uid=True)\ndrop_to(345678)\n"
        "print(os.getresuid(), os.getresgid(), os.getgroups(), len(os.listdir('/proc/self/fd')) > 0)\n"
        "names = ('CapEff', 'CapPrm', 'CapBnd', 'NoNew')\n"
        "print([l.split()[1] for l in open('/proc/self/status') if l.startswith(names)])\n"
        "try: os.setuid(0)\nexcept PermissionError: print('no')\n"
        "made = 0\n"
        "try:\n    while os.fork(): made += 1\n    os._exit(0)\nexcept BlockingIOError: print('bounded')"
    ).stdout
    zero = "0" * 16
    who = "(345678, 345678, 345678) (345678, 345678, 345678) [] True"
    assert out.splitlines()[:3] == [who, str([zero, zero, zero, "1"]), "no"]


@needs_root
def test_root_without_capabilities_is_nobody_special(tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("x")
    os.chown(secret, 1234, 1234)
    secret.chmod(0o600)
    out = run(
        "drop_capabilities()\n"
        f"for act in (lambda: open({str(secret)!r}), lambda: os.setuid(7), lambda: os.chroot('/')):\n"
        "    try: act(); print('yes')\n    except PermissionError: print('no')\n"
        "import subprocess\n"
        "print(subprocess.run(['grep', 'CapEff', '/proc/self/status'], capture_output=True, text=True).stdout)"
    ).stdout
    assert out.split() == ["no", "no", "no", "CapEff:", "0" * 16]


def test_what_another_uid_can_not_reach_is_told(tmp_path):
    locked = tmp_path / "locked"
    (locked / "in").mkdir(parents=True)
    locked.chmod(0o700)
    found = jail.blocked_at(str(locked / "in"))
    assert found
    assert str(locked).startswith(found)
    assert jail.blocked_at("/usr/bin") == ""
    assert jail.interpreter_readable() == (not any(jail.blocked_at(path) for path in jail.interpreter_dirs()))
    assert signal.SIGKILL == 9  # the number that the module writes out, to import nothing more
