"""The zygote: a warm interpreter of one template that forks sessions on the daemon's word.

Started fresh for each template and core. It never reads a request: request bytes and results pass only between daemon
and session, so that no session can find another's in its memory (measured otherwise: 13 of 20). It has one thread, so
that a fork is safe. Sources: notes/SANDBOX.md, sections 2 and 6.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import gc
import importlib
import importlib.util
import json
import os
import select
import signal
import socket
import sys
import time
from typing import Any, Dict, List, Optional, Tuple

from . import kernel, rootfs, session
from .idle import Idlers, is_ending
from .process import (
    become_subreaper,
    child_pids,
    die_with_parent,
    harden_keeper,
    interpreter_dirs,
    keep_capabilities,
    send_signal,
    signal_tree,
)

#: Name under which candidates' runner is preloaded (``code`` of a request that calls it names it).
_RUNNER = "collimate_runner"
#: CAP_SYS_PTRACE, to enter the namespace of a non-dumpable process; CAP_SYS_ADMIN, for namespaces and mounts.
_KEPT = 1 << 19 | 1 << 21
_OOM_SCORE = b"1000"
#: Bare forks that are measured at the start.
_BARE_FORKS = 9


def main(control_fd: int, setup_fd: int) -> None:
    """Serve the daemon until it hangs up.

    Args:
        control_fd: A SOCK_SEQPACKET socket to the daemon.
        setup_fd: A file that holds the set-up as JSON (``daemon/zygote.py`` has its fields).
    """
    control = socket.socket(fileno=control_fd)
    control.set_inheritable(False)
    with open(setup_fd, "rb") as text:
        setup = json.loads(text.read().decode("ascii"))
    die_with_parent()
    if os.getppid() != setup["parent"]:
        os._exit(0)
    began = time.monotonic()
    _settle(setup)
    preload(setup)
    spent_ms = round(1e3 * (time.monotonic() - began), 3)
    idlers = _idlers(setup)
    ready = {"ready": True, "ms": spent_ms, "bare_fork_ms": _bare_fork_ms(), "once": idlers is not None}
    kernel.send(control, ready)
    _Zygote(control, setup, idlers).run()


def _settle(setup: Dict[str, Any]) -> None:
    """Take the lowest priority among the machine's work, and enter the jail that all sessions share."""
    _yield_processor(setup["nice"], setup["joins"])
    with open("/proc/self/oom_score_adj", "wb") as adjust:
        adjust.write(_OOM_SCORE)
    become_subreaper()
    os.umask(0o022)
    for name in ("filter", "keeper_filter"):
        setup[name] = bytes.fromhex(setup[name])
    setup["read"] = [*setup["read"], *interpreter_dirs()]
    if setup["namespaces"]:
        session.enter_namespaces(setup)
        rootfs.enter(setup["root"], setup["read"])
        keep_capabilities(_KEPT)  # its sessions then have less to drop
        setup["box"] = rootfs.Box(setup["disk_mib"], setup["inodes"], setup["read"])
        os.environ.update(HOME=rootfs.WORK, TMPDIR="/tmp")
        kernel.sethostname(b"sandbox")
        os.chdir("/")
    else:
        harden_keeper()  # its sessions may have its user and see it


def _yield_processor(nice: int, joins: List[int]) -> None:
    for fd in joins:
        os.write(fd, b"0")
        os.close(fd)
    os.setpriority(os.PRIO_PROCESS, 0, max(nice, os.getpriority(os.PRIO_PROCESS, 0)))
    try:
        # where the kernel groups processes by session, only a group's own niceness counts outside of it
        with open("/proc/self/autogroup", "w") as group:
            group.write(str(nice))
    except OSError:  # this kernel does not
        pass


def preload(setup: Dict[str, Any]) -> None:
    """Import what the template wants, and leave memory as a fork likes it: collected, frozen, no collector running."""
    sys.path[:1] = setup["path"]  # in place of the directory that it was started in
    _load_runner(setup["runner"])
    for name in setup["preload"]:
        importlib.import_module(name)
    if setup["namespaces"]:
        rootfs.seal()
    gc.collect()
    gc.disable()
    gc.freeze()


def _idlers(setup: Dict[str, Any]) -> Optional[Idlers]:
    """Try whether execs can be forked beside an idle first process: only who owns its pid namespace can go back."""
    if setup["tier"] != "full":
        return None
    harden_keeper()  # a session sees its first process, whose memory is this one's
    try:
        idlers = Idlers()
        first = idlers.start()
        pidfd = kernel.open_pidfd(first)
        pid = idlers.fork_beside(pidfd, session.BESIDE)
    except OSError:
        return None
    if pid == 0:
        os._exit(0)
    os.close(pidfd)
    os.waitpid(pid, 0)
    os.kill(first, signal.SIGKILL)
    os.waitpid(first, 0)
    return idlers


def _load_runner(source: str) -> None:
    """Make the runner importable; its text came with the set-up."""
    spec = importlib.util.spec_from_loader(_RUNNER, None)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    exec(compile(source, _RUNNER + ".py", "exec"), module.__dict__)
    sys.modules[_RUNNER] = module


def _bare_fork_ms() -> float:
    """Measure what every fork costs here at least: a child that only exits."""
    times = []
    for _ in range(_BARE_FORKS):
        began = time.monotonic()
        pid = kernel.fork_into(0)
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)
        times.append(time.monotonic() - began)
    return round(1e3 * sorted(times)[_BARE_FORKS // 2], 3)


class _Zygote:
    """Forks sessions, and tells their ends.

    Args:
        control: The socket to the daemon.
        setup: The set-up.
        idlers: Start the first processes of sessions for one exec, or None.
    """

    def __init__(self, control: socket.socket, setup: Dict[str, Any], idlers: Optional[Idlers]) -> None:
        self._control, self._setup, self._idlers = control, setup, idlers
        #: pid -> number of each session whose first process was not reaped
        self._sessions: Dict[int, int] = {}
        #: pid of each exec beside an idle first process, and that one's pid
        self._beside: Dict[int, int] = {}
        self._wake_read, self._wake_write = os.pipe()
        for fd in (self._wake_read, self._wake_write):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, _ignore)

    def run(self) -> None:
        """Serve until the daemon hangs up."""
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        poll.register(self._wake_read, select.POLLIN)
        while True:
            ready = {fd for fd, _ in poll.poll()}
            if self._wake_read in ready:
                self._drain()
                self._reap()
            if self._control.fileno() in ready:
                message, fds = kernel.receive(self._control)
                if message is None:
                    self._leave()
                    return
                self._fork(message, fds)

    def _fork(self, message: Dict[str, Any], fds: List[int]) -> None:
        began, number = time.monotonic(), message["fork"]
        try:
            pid, handle = self._fork_once(number) if message["once"] else self._fork_first(number)
        except OSError as error:
            self._close(fds)
            kernel.send(self._control, {"failed": number, "error": "fork: %s" % os.strerror(error.errno or 0)})
            return
        if pid == 0:
            self._let_go()
            session.main(self._setup, message, fds)
            os._exit(0)
        self._close(fds)
        spent = round(1e3 * (time.monotonic() - began), 3)
        kernel.send(self._control, {"forked": number, "pid": pid, "ms": spent}, [handle])
        os.close(handle)

    def _fork_first(self, number: int) -> Tuple[int, int]:
        """Fork a session's first process; give its pid, 0 in itself, and a descriptor of it."""
        pid = kernel.fork_into(session.flags(self._setup))
        if pid == 0:
            return 0, -1
        self._sessions[pid] = number
        return pid, kernel.open_pidfd(pid)

    def _fork_once(self, number: int) -> Tuple[int, int]:
        """Fork an exec beside an idle first process; give its pid, 0 in itself, and a descriptor of the first."""
        assert self._idlers is not None
        first = self._idlers.start()
        handle = kernel.open_pidfd(first)
        try:
            pid = self._idlers.fork_beside(handle, session.BESIDE)
        except OSError:
            os.kill(first, signal.SIGKILL)
            os.close(handle)
            raise
        if pid == 0:
            os.close(handle)
            return 0, -1
        self._sessions[first] = number
        self._beside[pid] = first
        return pid, handle

    def _let_go(self) -> None:
        """In a session: undo what belongs to the zygote."""
        signal.set_wakeup_fd(-1)
        # not ``signal.signal``: its enumerations touch pages that a forked child then copies, for a third of a ms
        _signal.signal(_signal.SIGCHLD, _signal.SIG_DFL)
        self._close([self._wake_read, self._wake_write, self._control.detach()])
        if self._idlers is not None:
            self._idlers.close()

    def _reap(self) -> None:
        """Reap what ended, and tell; what a dead session left where no pid namespace ends it goes first."""
        ended = []
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid in self._sessions:
                ended.append({"gone": self._sessions.pop(pid)})
            elif pid in self._beside:
                ended.append(self._end(self._beside.pop(pid), status, usage))
            elif pid == 0 and not self._kill_orphans():
                break
        for message in ended:
            kernel.send(self._control, message)

    def _end(self, first: int, status: int, usage: Any) -> Dict[str, Any]:
        """End the session whose exec has ended, and give what the daemon hears of it.

        ``killed``: the exec ended because its first process did, as it does on somebody's word from outside only.
        """
        killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL and is_ending(first)
        os.kill(first, signal.SIGKILL)
        told = session.told(status, usage.ru_utime + usage.ru_stime, usage.ru_maxrss)
        return {"result": self._sessions[first], "killed": killed, **told}

    def _kill_orphans(self) -> bool:
        """Kill and reap children that are no session; tell whether there were any."""
        if self._setup["namespaces"]:
            return False
        orphans = [pid for pid in child_pids(os.getpid()) if pid not in self._sessions]
        for pid in orphans:
            send_signal(pid, signal.SIGSTOP)
            for each in [*signal_tree(pid, signal.SIGSTOP), pid]:
                send_signal(each, signal.SIGKILL)
            os.waitpid(pid, 0)
        return bool(orphans)

    def _leave(self) -> None:
        for pid in self._sessions:
            send_signal(pid, signal.SIGKILL)
        os._exit(0)

    def _drain(self) -> None:
        try:
            while os.read(self._wake_read, 4096):
                pass
        except BlockingIOError:
            pass

    @staticmethod
    def _close(fds: List[int]) -> None:
        for fd in fds:
            os.close(fd)


def _ignore(number: int, frame: Any) -> None:
    """Only wakes the loop."""
