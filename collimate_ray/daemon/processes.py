"""What the daemon sees of sessions' processes in ``/proc``: whose they are, and how much memory they hold together.

Must not touch a process that is neither of its own session uids nor marked by its directory.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable

from collimate_ray.jail import process as jail

#: Environment variable that marks zygotes and what descends from them: the digest of the daemon's directory.
MARK = "COLLIMATE_EXEC_ID"


def real_uid(pid: int) -> int | None:
    """Give a process's real uid (the owner of ``/proc/PID`` is root's for a non-dumpable process), or None."""
    try:
        with open(f"/proc/{pid}/status") as status:
            return next(int(line.split()[1]) for line in status if line.startswith("Uid:"))
    except (OSError, StopIteration):
        return None


def mark_of(pid: int) -> str:
    """Give the mark that a process was started with, or ""."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as environ:
            entries = environ.read().split(b"\0")
    except OSError:
        return ""
    prefix = f"{MARK}=".encode()
    return next((entry[len(prefix) :].decode("ascii", "replace") for entry in entries if entry.startswith(prefix)), "")


def kill_leftovers(digest: str, is_session_uid: Callable[[int], bool]) -> int:
    """Kill what an earlier daemon of the same directory left running.

    Args:
        digest: Of the directory: their mark.
        is_session_uid: Tells whether a uid is in the range of this daemon's sessions.

    Returns:
        How many were killed.
    """
    killed = 0
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        uid = real_uid(int(name))
        if (uid is not None and is_session_uid(uid)) or mark_of(int(name)) == digest:
            jail.send_signal(int(name), signal.SIGKILL)
            killed += 1
    return killed


def memory_kib(pids: list[int], enough: int) -> int:
    """Give the memory of several processes together, KiB.

    Args:
        pids: The processes.
        enough: Below this a quick upper bound is given (shared pages counted for each), else shared pages count once.
    """
    bound = sum(_resident_kib(pid) for pid in pids)
    return bound if bound <= enough else sum(_proportional_kib(pid) for pid in pids)


def _resident_kib(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/statm") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 10
    except (OSError, IndexError):
        return 0


def _proportional_kib(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/smaps_rollup") as rollup:
            return next(int(line.split()[1]) for line in rollup if line.startswith("Pss:"))
    except (OSError, StopIteration):
        return 0


def tree_of(pid: int) -> list[int]:
    """List a process and all below it."""
    found, pending = [], [pid]
    while pending:
        found.append(pending.pop())
        with contextlib.suppress(OSError):
            pending.extend(jail.child_pids(found[-1]))
    return found
