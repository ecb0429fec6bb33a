"""Which processes belong to an exec, ending them all, and what they used. Linux ``/proc`` only.

The daemon is a subreaper: whatever an exec leaves behind becomes a child of the daemon sooner or later, so looking at
its own children again and again finds everything, and no scan of the whole machine is needed. Must not touch a process
that is neither a child of this daemon nor of its own session uids nor marked by its directory.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from collimate_ray.jail import process as jail

_log = logging.getLogger(__name__)

#: Environment variable that marks an exec's processes: ``<digest of the daemon's directory>.<number>``.
MARK = "COLLIMATE_EXEC_ID"

#: An exec's processes must be gone after so many seconds of killing, else it is logged and left.
_SWEEP_S = 5.0
#: After so many rounds as root, all processes of the uid are killed in one stroke: a race of forks can't win it.
_ROUNDS = 10


@dataclass
class Rusage:
    """CPU time in seconds and the peak resident memory of the largest process, KiB."""

    cpu_s: float = 0.0
    max_rss_kib: int = 0

    def add(self, cpu_s: float, max_rss_kib: int) -> None:
        """Count one more reaped process."""
        self.cpu_s += cpu_s
        self.max_rss_kib = max(self.max_rss_kib, max_rss_kib)


@dataclass
class Family:
    """Running execs of one daemon: their main processes and marks.

    Attributes:
        mains: pid of each main process to its mark; only their Execution reaps them.
        is_session_uid: Tells whether a uid is in the range of this daemon's sessions.
    """

    is_session_uid: Callable[[int], bool]
    mains: dict[int, str] = field(default_factory=dict)

    async def sweep(self, mark: str, uid: int | None, used: Rusage) -> None:
        """Kill and reap what an exec left behind; its main process must be reaped already.

        Args:
            mark: The exec's mark.
            uid: The uid of its session, if it has one of its own.
            used: Gets what the reaped processes used.
        """
        deadline = time.monotonic() + _SWEEP_S
        rounds = 0
        while self._sweep_once(mark, uid, used):
            rounds += 1
            if uid is not None and rounds % _ROUNDS == 0:
                kill_uid(uid)
            if time.monotonic() > deadline:
                _log.warning("exec %s: processes are left that can't be killed", mark)
                return
            await asyncio.sleep(0 if rounds < 3 else 0.002)

    def _sweep_once(self, mark: str, uid: int | None, used: Rusage) -> bool:
        """Kill what is the exec's; True if another look is needed."""
        seen = False
        for pid in jail.child_pids(os.getpid()):
            if pid in self.mains:
                continue
            if _reap(pid, used):
                seen = True
            elif self._belongs(pid, mark, uid):
                _kill_tree(pid)
                seen = True
        return seen

    def _belongs(self, pid: int, mark: str, uid: int | None) -> bool:
        real = real_uid(pid)
        if real is not None and self.is_session_uid(real):
            return real == uid
        found = mark_of(pid)
        # a process that wiped its mark is nobody's: it goes with the next exec that ends
        return found == mark or found not in self.mains.values()

    def members(self, main: int, uid: int | None) -> list[int]:
        """List an exec's processes while it runs: the tree of its main process, and orphans of its uid."""
        found = tree_of(main)
        if uid is not None:
            orphans = (pid for pid in jail.child_pids(os.getpid()) if pid not in self.mains)
            found += [below for pid in orphans if real_uid(pid) == uid for below in tree_of(pid)]
        return found


def _reap(pid: int, used: Rusage) -> bool:
    try:
        reaped, _, usage = os.wait4(pid, os.WNOHANG)
    except ChildProcessError:
        return True
    if reaped:
        used.add(usage.ru_utime + usage.ru_stime, usage.ru_maxrss)
    return bool(reaped)


def _kill_tree(pid: int) -> None:
    """Kill a process and all below it, stopped first so that a bomb can't fork into the room of its dead."""
    jail.send_signal(pid, signal.SIGSTOP)
    for each in (*jail.signal_tree(pid, signal.SIGSTOP), pid):
        jail.send_signal(each, signal.SIGKILL)


def kill_group(pid: int) -> None:
    """Kill the process group that ``pid`` leads; ``pid`` must not be reaped yet."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def kill_uid(uid: int) -> None:
    """Kill every process of a session's uid in one stroke, from a short-lived process of that uid. Needs root."""
    pid = os.fork()
    if pid == 0:
        try:
            os.setresuid(uid, uid, uid)
            os.kill(-1, signal.SIGKILL)
        finally:
            os._exit(0)
    os.waitpid(pid, 0)


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
        digest: Of the directory; marks begin with it.
        is_session_uid: Tells whether a uid is in the range of this daemon's sessions.

    Returns:
        How many were killed.
    """
    killed = 0
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        uid = real_uid(int(name))
        if (uid is not None and is_session_uid(uid)) or mark_of(int(name)).startswith(f"{digest}."):
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
