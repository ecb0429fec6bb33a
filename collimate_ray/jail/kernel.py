"""System calls that Python does not offer: namespaces, mounts, a fork into them, descriptors of processes.

Must not decide what is fenced in. Sources: clone(2), unshare(2), setns(2), mount(2), pivot_root(2), pidfd_open(2).
"""

from __future__ import annotations

import array
import ctypes
import json
import mmap
import os
import socket
from typing import Any, Dict, List, Optional, Sequence, Tuple

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
MNT_DETACH = 2
_SIGCHLD = 17

#: System call numbers by machine: clone, pivot_root; those of later calls are everybody's.
_NUMBERS = {"x86_64": (56, 155), "aarch64": (220, 41)}
_CLONE, _PIVOT_ROOT = _NUMBERS.get(os.uname().machine, (-1, -1))
_PIDFD_OPEN, _MOUNT_SETATTR = 434, 442
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000

#: Keeps the interpreter's lock: a child of ``clone`` has only this thread, and nobody could give the lock back.
_LOCKED = ctypes.PyDLL(None, use_errno=True)
_LIBC = ctypes.CDLL(None, use_errno=True)
_LOCKED.syscall.restype = ctypes.c_long

#: Longest message between daemon, zygote and session, bytes: requests travel in files of their own.
_MAX_MESSAGE = 1 << 16
#: Most descriptors with a message.
_MAX_FDS = 16


def _check(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, "%s: %s" % (what, os.strerror(number)))
    return result


def unshare(flags: int) -> None:
    """Enter fresh namespaces.

    Raises:
        OSError: The kernel refuses.
    """
    _check(_LIBC.unshare(ctypes.c_int(flags)), "unshare")


def fork_into(flags: int) -> int:
    """Fork into fresh namespaces, without the interpreter's at-fork hooks: for single-threaded processes only.

    Returns:
        0 in the child, its pid in the parent.

    Raises:
        OSError: The kernel refuses.
    """
    return _check(_LOCKED.syscall(_CLONE, ctypes.c_ulong(flags | _SIGCHLD), None, None, None, None), "clone")


def clone(start: int, stack_end: int, flags: int) -> int:
    """Start a process that runs what stands at ``start``, on a stack of its own, and give its pid."""
    argument = ctypes.c_void_p(None)
    return _check(
        _LOCKED.clone(ctypes.c_void_p(start), ctypes.c_void_p(stack_end), ctypes.c_int(flags), argument), "clone"
    )


def setns(pidfd: int, kind: int) -> None:
    """Enter a namespace of a process, or choose it for the next children (Linux 5.8)."""
    _check(_LIBC.setns(ctypes.c_int(pidfd), ctypes.c_int(kind)), "setns")


def make_executable(page: mmap.mmap) -> int:
    """Let what stands in a mapped page be run, and not be changed; give its address."""
    address = ctypes.addressof(ctypes.c_char.from_buffer(page))
    protection = ctypes.c_int(mmap.PROT_READ | mmap.PROT_EXEC)
    _check(_LIBC.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(len(page)), protection), "mprotect")
    return address


def sethostname(name: bytes) -> None:
    """Name the machine, in a UTS namespace."""
    _check(_LIBC.sethostname(name, ctypes.c_size_t(len(name))), "sethostname")


def open_pidfd(pid: int) -> int:
    """Open a descriptor of a process, closed on exec."""
    return _check(_LOCKED.syscall(_PIDFD_OPEN, ctypes.c_int(pid), ctypes.c_uint(0)), "pidfd_open")


class Mount:
    """A mount to be made later: what a forked child need not work out itself, it does not copy pages for."""

    def __init__(self, source: str, target: str, kind: str, flags: int, options: str = "") -> None:
        source_, target_, kind_, options_ = (
            ctypes.c_char_p(os.fsencode(text)) for text in (source, target, kind, options)
        )
        self._arguments = (source_, target_, kind_, ctypes.c_ulong(flags), options_)
        self._target = target

    def make(self) -> None:
        """Mount.

        Raises:
            OSError: With the target in its text.
        """
        if _LIBC.mount(*self._arguments) != 0:
            _check(-1, "mount on %s" % self._target)


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    """Mount.

    Raises:
        OSError: With the target in its text.
    """
    Mount(source, target, kind, flags, options).make()


def bind(source: str, target: str, flags: int) -> None:
    """Show a file or directory at a second place, there with ``flags`` (``MS_RDONLY`` and the like).

    Mounts below the source do not come along: nothing is shown that was not asked for.
    """
    mount(source, target, "", MS_BIND)
    # in a user namespace, flags that the source's mount is locked to must stay
    mount("", target, "", MS_BIND | MS_REMOUNT | flags | _locked_flags(target))


def set_read_only(target: str) -> None:
    """Make a mount and all below it read-only, without set-uid programs and devices (Linux 5.12)."""
    attributes = (ctypes.c_uint64 * 4)(MS_RDONLY | MS_NOSUID | MS_NODEV, 0, 0, 0)
    size = ctypes.c_size_t(ctypes.sizeof(attributes))
    path = os.fsencode(target)
    _check(_LIBC.syscall(_MOUNT_SETATTR, _AT_FDCWD, path, _AT_RECURSIVE, attributes, size), "mount_setattr")


def _locked_flags(target: str) -> int:
    # ST_RDONLY, ST_NOSUID, ST_NODEV and ST_NOEXEC have the numbers of their MS_ twins; relatime is the kernel's default
    return os.statvfs(target).f_flag & (MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC) | _atime_flags(target)


def _atime_flags(target: str) -> int:
    # ST_NOATIME, ST_NODIRATIME: 1024 and 2048 in both worlds
    return os.statvfs(target).f_flag & (1024 | 2048)


def pivot_root(new_root: str) -> None:
    """Make ``new_root``, a mount, the root, and let the old one go."""
    os.chdir(new_root)
    _check(_LIBC.syscall(_PIVOT_ROOT, b".", b"."), "pivot_root")
    _check(_LIBC.umount2(b".", MNT_DETACH), "umount of the old root")
    os.chdir("/")


def send(sock: socket.socket, message: Dict[str, Any], fds: Sequence[int] = ()) -> None:
    """Send one message with descriptors (``socket.send_fds`` came with Python 3.9)."""
    packed = array.array("i", fds).tobytes()
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, packed)] if fds else []
    sock.sendmsg([json.dumps(message).encode("ascii")], ancillary)


def receive(sock: socket.socket) -> Tuple[Optional[Dict[str, Any]], List[int]]:
    """Take one message with its descriptors, which are closed on exec; None: the other end is gone."""
    fds = array.array("i")
    room = socket.CMSG_LEN(_MAX_FDS * fds.itemsize)
    data, ancillary, _, _ = sock.recvmsg(_MAX_MESSAGE, room, getattr(socket, "MSG_CMSG_CLOEXEC", 0x40000000))
    for level, kind, body in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(body[: len(body) - len(body) % fds.itemsize])
    return (json.loads(data.decode("ascii")) if data else None), list(fds)
