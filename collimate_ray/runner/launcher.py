"""The launcher: forked before any secret is read, it forks one candidate process after another.

It never runs a candidate's code itself, so each candidate starts from memory that holds no request. It is a
subreaper: what a candidate leaves behind, however it detached itself, lands here and is killed.
"""

from __future__ import annotations

import array
import errno
import fcntl
import os
import socket
import sys
from collections.abc import Callable
from typing import Any

from collimate_ray.jail.pins import pin
from collimate_ray.jail.process import (
    become_subreaper,
    die_with_parent,
    drop_capabilities,
    drop_to,
    set_dumpable,
    set_limits,
    sweep_children,
)
from collimate_ray.runner.candidate import run_program, serve_candidate
from collimate_ray.values import dumps, loads

#: Bytes of an order, at most: a candidate's source does not travel this way.
_MAX_ORDER = 1 << 16

#: Descriptors are moved out of the way up here before they get their places.
_HIGH_FD = 64

#: No descriptor of the launcher's is above this: it holds two and those of one order.
_TOP_FD = 1024

#: What a candidate's process goes through besides, for good: whoever preloaded the runner may add to it.
FENCES: list[Callable[[], None]] = []


def send_order(sock: socket.socket, order: Any, fds: list[int]) -> None:
    """Send one message with descriptors (socket.send_fds came with Python 3.9)."""
    packed = array.array("i", fds).tobytes()
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, packed)] if fds else []
    sock.sendmsg([dumps(order).encode("ascii")], ancillary)


def receive_order(sock: socket.socket) -> tuple[Any, list[int]]:
    """Take one message with its descriptors; None: the other end is gone."""
    fds = array.array("i")
    data, ancillary, _, _ = sock.recvmsg(_MAX_ORDER, socket.CMSG_LEN(8 * fds.itemsize))
    for level, kind, body in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(body[: len(body) - len(body) % fds.itemsize])
    return (loads(data.decode("ascii")) if data else None), list(fds)


def launch(sock: socket.socket) -> None:
    """Serve the keeper's orders: start a candidate, tell its end, reap it when told, until the keeper hangs up."""
    become_subreaper()
    die_with_parent()
    _null_streams()
    while True:
        order, fds = receive_order(sock)
        if order is None:
            sweep_children()
            os._exit(0)
        try:
            pid = os.fork()
        except OSError as error:
            send_order(sock, {"failed": errno.errorcode.get(error.errno or 0, "fork")}, [])
            _close_all(fds)
            continue
        if pid == 0:
            sock.close()
            _become_candidate(order, fds)
        _close_all(fds)
        send_order(sock, {"pid": pid}, [])
        _see_off(sock, pid)


def _see_off(sock: socket.socket, pid: int) -> None:
    """Tell the keeper that the candidate ended; reap it only when the keeper knows, so that its pid stays its own."""
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    send_order(sock, {"exited": pid}, [])
    order, _ = receive_order(sock)
    _, status, usage = os.wait4(pid, 0)
    sweep_children()
    if order is None:
        os._exit(0)
    seen = {"status": status, "cpu_s": usage.ru_utime + usage.ru_stime, "rss_kib": usage.ru_maxrss}
    send_order(sock, seen, [])


def _become_candidate(order: dict[str, Any], fds: list[int]) -> None:
    """Turn this forked process into a candidate's: its own group, directory, limits and user; then run."""
    os.setsid()
    for place, fd in enumerate([fcntl.fcntl(fd, fcntl.F_DUPFD, _HIGH_FD) for fd in fds]):
        os.dup2(fd, place)
    os.chdir(order["dir"])
    for name in [name for name in os.environ if name.startswith("COLLIMATE_")]:
        del os.environ[name]
    os.environ.update(HOME=order["dir"], TMPDIR=order["dir"])
    set_limits(order["memory_mib"], order["processes"], order["files"], order["file_mib"], order["own_uid"])
    if order["uid"] is not None:
        drop_to(order["uid"])
    else:
        drop_capabilities()
        set_dumpable()
    die_with_parent()
    for fence in FENCES:
        fence()
    os.closerange(len(fds), _TOP_FD)
    pin(order["seed"])  # here, not in what it was forked from: each begins anew, whatever was forked before it
    if order["mode"] == "program":
        run_program(note_fd=3)
    serve_candidate(3, 4)


def _null_streams() -> None:
    """Let go of the request and of the report's stream."""
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    sys.stdout.flush()


def _close_all(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)
