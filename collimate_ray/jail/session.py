"""A session's first process: builds its fence, forks one exec after the other, reaps all that each leaves behind.

In the tiers with namespaces it is pid 1 of the session's own pid namespace: what it forks ends with it, whatever
happens. In the others it is a subreaper. It never reads a request: the exec's process does, and the daemon's words
reach this one as signals. Must not run a candidate's code. A session for one exec only can do without it, where another
keeps the pid namespace (``idle.py``): then the exec's process builds its fence itself. Sources: pid_namespaces(7),
prctl(2).
"""

from __future__ import annotations

import os
import signal
import socket
from typing import Any, Dict, List, Optional

from . import kernel, run
from .process import become_subreaper, die_with_parent, harden_keeper, keep_capabilities, send_signal, signal_tree

#: The daemon's words: "end the exec that runs", and "there may be another one".
STOP, AGAIN = signal.SIGUSR1, signal.SIGUSR2

_ZYGOTE_NAMESPACES = kernel.CLONE_NEWNS | kernel.CLONE_NEWNET | kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS
#: Those of a session, but for the pid namespace.
BESIDE = kernel.CLONE_NEWNS | kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS
#: The zygote's user in its own user namespace, where it has one: any but 0, which programs take for all-powerful.
_MAPPED = 65533


def enter_namespaces(setup: Dict[str, Any]) -> None:
    """Enter the namespaces that a zygote's sessions share: the empty network among them, too dear for each session."""
    uid, gid = os.getuid(), os.getgid()
    if setup["tier"] == "userns":
        kernel.unshare(kernel.CLONE_NEWUSER | _ZYGOTE_NAMESPACES)
        _map_ids(_MAPPED, uid, gid)
    else:
        kernel.unshare(_ZYGOTE_NAMESPACES)


def _map_ids(inside: int, uid: int, gid: int) -> None:
    for name, line in (
        ("setgroups", "deny"),
        ("uid_map", "%d %d 1" % (inside, uid)),
        ("gid_map", "%d %d 1" % (inside, gid)),
    ):
        with open("/proc/self/" + name, "w") as target:
            target.write(line)


def flags(setup: Dict[str, Any]) -> int:
    """Give the namespaces that a session is forked into."""
    if not setup["namespaces"]:
        return 0
    return BESIDE | kernel.CLONE_NEWPID | (kernel.CLONE_NEWUSER if setup["tier"] == "userns" else 0)


def main(setup: Dict[str, Any], message: Dict[str, Any], fds: List[int]) -> None:
    """Be a session until the daemon ends it.

    Args:
        setup: The zygote's.
        message: ``uid`` (the slot's own, or None), ``work`` and ``tmp`` (directories, where there are no namespaces),
            ``once`` (there is one exec, and a first process beside it).
        fds: The socket to the daemon, and the cgroup files that an exec joins by writing to them.
    """
    sock = socket.socket(fileno=fds[0])
    place = run.Place(setup, message, fds[1:])
    if setup["namespaces"]:
        uid = message["uid"]
        if setup["tier"] == "userns":
            _map_ids(uid, _MAPPED, _MAPPED)
        place.has_proc = setup["box"].mount(uid)
    else:
        become_subreaper()
    keep_capabilities()
    harden_keeper()
    die_with_parent()
    os.chdir(place.work)
    if message["once"]:
        run.park(sock, place)
    _Execs(sock, place).run()


def told(status: int, cpu_s: float, rss_kib: int) -> Dict[str, Any]:
    """Give what the daemon hears of the end of an exec's process."""
    return {"ended": status, "cpu_s": round(cpu_s, 6), "rss_kib": rss_kib}


class _Execs:
    """Forks the processes of one exec after the other.

    Args:
        sock: The socket to the daemon.
        place: Where and how they run.
    """

    def __init__(self, sock: socket.socket, place: run.Place) -> None:
        self._sock, self._place = sock, place
        signal.pthread_sigmask(signal.SIG_BLOCK, {AGAIN})
        signal.signal(STOP, self._on_stop)

    def run(self) -> None:
        """Serve for ever; an exec that ended without having begun was told that the daemon is gone."""
        while True:
            pid = os.fork()
            if pid == 0:
                signal.signal(STOP, signal.SIG_DFL)
                signal.pthread_sigmask(signal.SIG_UNBLOCK, {AGAIN})
                run.park(self._sock, self._place)
            status = self._wait(pid)
            cpu_s, rss_kib = self._used
            kernel.send(self._sock, told(status, cpu_s, rss_kib))
            signal.sigwait({AGAIN})  # most sessions have one exec: a fork in vain is a third of its cost

    def _wait(self, pid: int) -> int:
        """Wait for an exec's process, then kill and reap all else; give its wait status."""
        self._used = (0.0, 0)
        status = None
        while status is None:
            status = self._reap(pid)
        self._kill_all()
        while True:
            try:
                self._reap(pid)
            except ChildProcessError:
                return status
            if not self._place.namespaces:
                self._kill_all()

    def _reap(self, main: int) -> Optional[int]:
        pid, status, usage = os.wait4(-1, 0)
        cpu_s, rss_kib = self._used
        self._used = (cpu_s + usage.ru_utime + usage.ru_stime, max(rss_kib, usage.ru_maxrss))
        return status if pid == main else None

    def _on_stop(self, number: int, frame: Any) -> None:
        self._kill_all()

    def _kill_all(self) -> None:
        """Kill everything but this process; the caller reaps."""
        if self._place.namespaces:
            try:
                os.kill(-1, signal.SIGKILL)
            except ProcessLookupError:
                pass
            return
        # stopped first: a dead process makes room for the next fork of a bomb, a stopped one does not
        for pid in signal_tree(os.getpid(), signal.SIGSTOP):
            send_signal(pid, signal.SIGKILL)
