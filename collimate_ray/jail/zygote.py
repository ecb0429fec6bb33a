"""The zygote: a warm interpreter of one template that forks sessions on the daemon's word.

Started fresh for each template and core. It never reads a request: request bytes and results pass only between daemon
and session, so that no session can find another's in its memory (measured otherwise: 13 of 20). It has one thread, so
that a fork is safe. Sources: notes/SANDBOX.md, sections 2 and 6.
"""

from __future__ import annotations

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
from typing import Any, Dict, List

from . import kernel, rootfs, session
from .process import (
    become_subreaper,
    child_pids,
    die_with_parent,
    harden_keeper,
    interpreter_dirs,
    send_signal,
    signal_tree,
)

#: Name under which candidates' runner is preloaded (``code`` of a request that calls it names it).
_RUNNER = "collimate_runner"
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
    kernel.send(control, {"ready": True, "ms": spent_ms, "bare_fork_ms": _bare_fork_ms()})
    _Zygote(control, setup).run()


def _settle(setup: Dict[str, Any]) -> None:
    """Take the lowest priority among the machine's work, and enter the jail that all sessions share."""
    os.setpriority(os.PRIO_PROCESS, 0, max(setup["nice"], os.getpriority(os.PRIO_PROCESS, 0)))
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
        kernel.sethostname(b"sandbox")
        os.chdir("/")
    else:
        harden_keeper()  # its sessions may have its user and see it


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
    """

    def __init__(self, control: socket.socket, setup: Dict[str, Any]) -> None:
        self._control, self._setup = control, setup
        #: pid -> id of each session that was not reaped
        self._sessions: Dict[int, int] = {}
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
        began = time.monotonic()
        try:
            pid = kernel.fork_into(session.flags(self._setup))
        except OSError as error:
            self._close(fds)
            kernel.send(self._control, {"failed": message["fork"], "error": "fork: %s" % os.strerror(error.errno or 0)})
            return
        if pid == 0:
            self._let_go()
            session.main(self._setup, message, fds)
            os._exit(0)
        self._close(fds)
        self._sessions[pid] = message["fork"]
        handle = kernel.open_pidfd(pid)
        spent = round(1e3 * (time.monotonic() - began), 3)
        kernel.send(self._control, {"forked": message["fork"], "pid": pid, "ms": spent}, [handle])
        os.close(handle)

    def _let_go(self) -> None:
        """In a session: undo what belongs to the zygote."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._close([self._wake_read, self._wake_write])
        self._control.close()

    def _reap(self) -> None:
        """Reap what ended, and tell; what a dead session left where no pid namespace ends it goes first."""
        ended = []
        while True:
            try:
                pid, _ = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid in self._sessions:
                ended.append(self._sessions.pop(pid))
            elif pid == 0 and not self._kill_orphans():
                break
        for number in ended:
            kernel.send(self._control, {"ended": number})

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
