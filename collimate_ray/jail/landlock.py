"""Landlock: a process gives up for good all files, sockets and processes but those of its own domain.

Must not decide who is fenced in, nor read the environment. Sources: landlock(7), ``include/uapi/linux/landlock.h``.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import struct
from typing import Optional, Sequence

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # on every machine
_VERSION, _PATH_BENEATH = 1, 1
#: Linux 6.15: do not write each refusal to the kernel's log, which a hostile program would fill.
_LOG_SAME_EXEC_OFF = 1

EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1, 2, 4, 8
#: Accesses to files that each version of the interface brought: the first thirteen, REFER, TRUNCATE, IOCTL_DEV.
_FIRST, _REFER, _TRUNCATE, _IOCTL_DEV = (1 << 13) - 1, 1 << 13, 1 << 14, 1 << 15
_FS_SINCE = ((1, _FIRST), (2, _REFER), (3, _TRUNCATE), (5, _IOCTL_DEV))
_NET_ABI, _SCOPE_ABI = 4, 6
#: Bind and connect of TCP.
_NET = 3
#: Abstract unix sockets and signals.
_SCOPES = 3
_READ = EXECUTE | READ_FILE | READ_DIR
#: What a rule for something that is not a directory may have.
_OF_FILES = EXECUTE | WRITE_FILE | READ_FILE | _TRUNCATE | _IOCTL_DEV
_OF_DEVICES = READ_FILE | WRITE_FILE | _TRUNCATE

#: Devices that every program may expect.
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.syscall.restype = ctypes.c_long


def abi(limit: Optional[int] = None) -> int:
    """Give the version of the kernel's Landlock, at most ``limit``; 0: it has none, or it is off."""
    found = int(_LIBC.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint(_VERSION)))
    return max(0, found if limit is None else min(found, limit))


def make(read: Sequence[str], write: Sequence[str], *, scoped: bool, abi: int, devices: Sequence[str] = DEVICES) -> int:
    """Make a set of rules that refuses what it does not name: files, TCP and, from version 6 on, processes outside.

    Args:
        read: What may be read and executed, with all beneath it. A path that can't be reached needs no rule.
        write: Where everything is allowed, with all beneath it.
        scoped: Refuse signals to processes outside the domain and their abstract unix sockets, where the version can.
        abi: Of ``abi()``, at least 1.
        devices: What may be read and written.

    Returns:
        A descriptor, for ``restrict``.

    Raises:
        OSError: The kernel refuses.
    """
    files = sum(accesses for since, accesses in _FS_SINCE if since <= abi)
    handle = _create(files, _NET if abi >= _NET_ABI else 0, _SCOPES if scoped and abi >= _SCOPE_ABI else 0, abi)
    for paths, accesses in ((read, _READ), (write, files), (devices, _OF_DEVICES & files)):
        for path in paths:
            _allow(handle, path, accesses)
    return handle


def scope_only(abi: int) -> Optional[int]:
    """Make a set of rules that only refuses signals to processes outside, and their abstract unix sockets.

    Returns:
        A descriptor, for ``restrict``; None: this version can't.
    """
    return _create(0, 0, _SCOPES, abi) if abi >= _SCOPE_ABI else None


def restrict(fd: int) -> None:
    """Put this thread and all that it starts under rules, for good. ``no_new_privs`` must be set.

    Raises:
        OSError: The kernel refuses.
    """
    if _LIBC.syscall(_RESTRICT_SELF, ctypes.c_int(fd), ctypes.c_uint(_LOG_SAME_EXEC_OFF)) == 0:
        return
    if ctypes.get_errno() != errno.EINVAL:  # what older kernels say to the flag
        _fail("landlock_restrict_self")
    if _LIBC.syscall(_RESTRICT_SELF, ctypes.c_int(fd), ctypes.c_uint(0)) != 0:
        _fail("landlock_restrict_self")


def _create(files: int, net: int, scopes: int, abi: int) -> int:
    # as long as the version's own: an older kernel takes no more
    words = (files, net, scopes)[: 1 + (abi >= _NET_ABI) + (abi >= _SCOPE_ABI)]
    attributes = struct.pack("=%dQ" % len(words), *words)
    handle = int(_LIBC.syscall(_CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), ctypes.c_uint(0)))
    if handle < 0:
        _fail("landlock_create_ruleset")
    return handle


def _allow(handle: int, path: str, accesses: int) -> None:
    try:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return
    try:
        if not stat.S_ISDIR(os.fstat(place).st_mode):
            accesses &= _OF_FILES
        rule = struct.pack("=Qi", accesses, place)
        if _LIBC.syscall(_ADD_RULE, ctypes.c_int(handle), _PATH_BENEATH, rule, ctypes.c_uint(0)) != 0:
            _fail("landlock_add_rule for %s" % path)
    finally:
        os.close(place)


def _fail(what: str) -> None:
    number = ctypes.get_errno()
    raise OSError(number, "%s: %s" % (what, os.strerror(number)))
