"""The processes that a command started, to the last: none may stay behind.

Ray starts processes that start processes, and the sandbox daemon detaches itself on purpose. As a "child
subreaper" (prctl(2), Linux 3.4) this process becomes the parent of each of them whose own parent ends, so
that all can be found and ended, whatever way they were started and however early a start-up was broken off.
Must only touch descendants.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen

#: prctl(2)
_PR_SET_CHILD_SUBREAPER = 36
#: Seconds after SIGTERM: a daemon lets go at the second one, in far less; Ray's GCS and monitor never end
#: by it (2.60).
GRACE_S = 2.0

#: Waits until its standard input ends, which is when its parent ended without a chance to clean up
#: (SIGKILL, out of memory). Then kills who has the mark in his environment, and processes of Ray (whose
#: titles overwrite theirs) that have a file in the directory open; three times over since those may be
#: starting others.
_GUARD = """
import os, shutil, signal, sys, time
mark, directory = sys.argv[1:]
def read(pid, name):
    with open(f"/proc/{pid}/{name}", "rb") as file:
        return file.read()
def is_ours(pid):
    if os.fsencode(mark) in read(pid, "environ").split(b"\\0"):
        return int(pid) != os.getpid()
    files = (os.readlink(f"/proc/{pid}/fd/{number}") for number in os.listdir(f"/proc/{pid}/fd"))
    return read(pid, "cmdline").startswith(b"ray::") and any(file.startswith(directory) for file in files)
sys.stdin.buffer.read()
for _ in range(3):
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if is_ours(pid):
                os.kill(int(pid), signal.SIGKILL)
        except OSError:
            continue
    time.sleep(0.5)
shutil.rmtree(directory, ignore_errors=True)
"""


def start_guard(mark: str, directory: Path) -> Popen[bytes]:
    """Start a process that cleans up after this one, should this one be killed.

    Args:
        mark: ``NAME=value``, in the environment of what is to be killed.
        directory: What is to be removed.
    """
    python = [sys.executable, "-I", "-S", "-c", _GUARD, mark, str(directory)]
    return Popen(python, stdin=PIPE, stdout=DEVNULL, stderr=DEVNULL, start_new_session=True)


def end_guard(guard: Popen[bytes]) -> None:
    """End a guard that is not needed any more."""
    guard.kill()
    guard.communicate()


def become_subreaper(on: bool = True) -> None:
    """Adopt orphaned descendants from now on, or stop doing so."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, int(on), 0, 0, 0)


def descendants() -> set[int]:
    """Give the pids of all processes below this one, those that ended but were not waited for included."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            children.setdefault(_parent_of(entry), []).append(int(entry.name))
    found: set[int] = set()
    todo = [os.getpid()]
    while todo:
        below = [pid for pid in children.get(todo.pop(), []) if pid not in found]
        found.update(below)
        todo.extend(below)
    return found


def _parent_of(entry: Path) -> int:
    try:
        # the command name may hold spaces and parentheses: the fields start after its last ")"
        return int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, IndexError, ValueError):
        return 0  # it ended meanwhile


def end_all(spared: set[int]) -> None:
    """End and reap every descendant but ``spared``: SIGTERM, again for a daemon that drains, then SIGKILL."""
    for number, patience_s in ((signal.SIGTERM, 0.5), (signal.SIGTERM, GRACE_S), (signal.SIGKILL, GRACE_S)):
        end = time.monotonic() + patience_s
        _signal_all(descendants() - spared, number)
        while _reap(descendants() - spared) and time.monotonic() < end:
            time.sleep(0.02)  # nothing tells a parent of several strangers' ends but asking
            if number == signal.SIGKILL:
                _signal_all(descendants() - spared, number)


def _signal_all(pids: set[int], number: signal.Signals) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def _reap(pids: set[int]) -> bool:
    """Wait for those that ended; tell whether any is left."""
    left = False
    for pid in pids:
        try:
            left |= os.waitpid(pid, os.WNOHANG)[0] == 0
        except ChildProcessError:
            left |= Path(f"/proc/{pid}").exists()  # a grandchild: its parent reaps it, or we do once that ended
    return left
