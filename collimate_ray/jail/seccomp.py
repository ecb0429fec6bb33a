"""The system call filter of sandboxed programs: a list of what is allowed, as a BPF program made of plain bytes.

Built once by the daemon, installed by each exec's process. Must not know why a session gets which variant. A refused
call gives EPERM (EACCES for sockets) and the program goes on; one made by a foreign calling convention, with numbers
that mean other calls, ends it. Sources: seccomp(2), Linux's ``Documentation/userspace-api/seccomp_filter.rst``.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from typing import Dict, List, NamedTuple, Optional, Sequence, Tuple, Union

from . import syscalls

ALLOW, KILL = 0x7FFF0000, 0x80000000
_ERRNO = 0x00050000
EPERM, EACCES, ENOSYS = _ERRNO | errno.EPERM, _ERRNO | errno.EACCES, _ERRNO | errno.ENOSYS
#: The call is not made, and says that it was.
IDLE = _ERRNO

#: BPF: load a word of the call's description; AND; jump if equal, if at least, always; return.
_LD, _AND, _JEQ, _JGE, _JA, _RET = 0x20, 0x54, 0x15, 0x35, 0x05, 0x06
#: Offsets in ``struct seccomp_data``; arguments are little-endian, their lower half first.
_AT_NUMBER, _AT_ARCH, _AT_ARGS = 0, 4, 16
#: Farthest that a conditional jump goes, instructions.
_MAX_JUMP = 255
_INSTRUCTION = struct.Struct("=HBBI")

#: Stands for the caller's pid until ``install``; above every pid that Linux gives (at most 4194304).
PID = 0x7F5EC09D
_PID_BYTES = struct.pack("=I", PID)
#: First number of x86_64's second calling convention.
_X32 = 0x40000000

_WORD = 0xFFFFFFFF
#: CLONE_NEW{NS,CGROUP,UTS,IPC,USER,PID,NET}; CLONE_PARENT, which makes a sibling whom nobody expects.
_CLONE_NEW, _CLONE_PARENT = 0x7E020000, 0x00008000
#: Pages of the machine's reserve, which no memory limit counts: mmap's flag, memfd_create's.
_MAP_HUGETLB, _MFD_HUGETLB = 0x00040000, 0x0004
#: Merged pages tell by the time of a write whether another process has the same.
_MADV_MERGEABLE = 12
_AF_UNIX, _SOCK_STREAM, _SOCK_SEQPACKET, _SOCK_TYPE_MASK = 1, 1, 5, 0xF
_S_IFMT, _S_IFIFO = 0o170000, 0o010000
#: What programs ask of any file, pipe or socket: TCGETS, TCSETS{,W,F}, TIOCGPGRP, TIOCOUTQ, TIOCGWINSZ, FIONREAD,
#: FIONBIO, TIOCGSID, FIO{N,}CLEX, FIOASYNC, FIOQSIZE, SIOCATMARK, FICLONE, TCGETS2. Not: what types into a terminal,
#: chooses whom to signal, or is a file system's or driver's own.
_IOCTLS: Tuple[int, ...] = (0x5401, 0x5402, 0x5403, 0x5404, 0x540F, 0x5411, 0x5413, 0x541B, 0x5421, 0x5429, 0x5450)
_IOCTLS += (0x5451, 0x5452, 0x5460, 0x8905, 0x40049409, 0x802C542A)
#: F_SETLEASE holds up others who open the file, for 45 s; F_NOTIFY tells what they do; F_SETOWN, F_SETSIG, F_SETOWN_EX:
#: whom the kernel signals when a file is ready, and those signals reach a pid namespace's first process too.
_OTHERS_FCNTLS = (1024, 1026, 8, 10, 15)
#: SO_ATTACH_{FILTER,BPF,REUSEPORT_CBPF,REUSEPORT_EBPF}: programs that the kernel compiles and runs.
_SOCKET_PROGRAMS = (26, 50, 51, 52)
#: O_TRUNC with the access modes that do not ask to write: "read only", and 3, "neither".
_ACCESS_AND_TRUNC, _STRAY_TRUNCS = 0o1003, (0o1000, 0o1003)
#: Calls that change or watch what they name, and that Landlock lets through to all files of the caller's user.
_STRAY = (
    "chown fchown lchown fchownat setxattr lsetxattr fsetxattr setxattrat removexattr lremovexattr fremovexattr "
    "removexattrat inotify_add_watch truncate"
).split()
#: The same, which honest programs make along with a copy: they do nothing, and say that it is well.
_IDLE = "chmod fchmod fchmodat fchmodat2 utime utimes futimesat utimensat".split()
#: PR_ options that neither change nor tell anything beyond the caller: pdeathsig, dumpable, keepcaps, name, seccomp,
#: capbset, tsc, securebits (reading), timer slack, subreaper, no_new_privs, tid address, huge pages, ambient set,
#: vectors, speculation (reading), pointer keys, tagged addresses, write-xor-execute, names of mappings, auxv.
#: Not: mm, ptracer, setting of speculation, core scheduling, page merging, dispatch.
_PRCTLS: Tuple[int, ...] = (1, 2, 3, 4, 7, 8, 15, 16, 21, 22, 23, 24, 25, 27, 29, 30, 36, 37, 38, 39, 40, 41, 42, 47)
_PRCTLS += (50, 51, 52, 54, 55, 56, 63, 64, 65, 66, 0x53564D41, 0x41555856)
#: The strict mode kills who makes another call by SIGKILL, as only the machine does otherwise.
_PR_SET_SECCOMP, _MODE_FILTER = 22, 2
_PRIO_PROCESS, _IOPRIO_WHO_PROCESS = 0, 1
_PERSONALITY_QUERY = 0xFFFFFFFF


class Check(NamedTuple):
    """A decision by the lower 32 bits of an argument: the kernel itself reads no more of those that are checked."""

    arg: int
    mask: int
    values: Sequence[int]
    listed: Action
    otherwise: Action


Action = Union[int, Check]


def _only(arg: int, values: Sequence[int], otherwise: int = EPERM, mask: int = _WORD) -> Check:
    return Check(arg, mask, values, ALLOW, otherwise)


def _not(arg: int, values: Sequence[int]) -> Check:
    return Check(arg, _WORD, values, EPERM, ALLOW)


def _rules(unix_sockets: bool, own_signals_only: bool, own_files_only: bool) -> Dict[str, Action]:
    """Give what is decided for calls that are not simply allowed."""
    rules: Dict[str, Action] = {
        "clone": _only(0, (0,), mask=_CLONE_NEW | _CLONE_PARENT),
        "clone3": ENOSYS,  # its flags lie in memory, which no filter reads; libc falls back to clone
        "personality": _only(0, (_PERSONALITY_QUERY,)),
        "mknod": _only(1, (_S_IFIFO,), mask=_S_IFMT),
        "mknodat": _only(2, (_S_IFIFO,), mask=_S_IFMT),
        "ioctl": _only(1, _IOCTLS),
        "fcntl": _not(1, _OTHERS_FCNTLS),
        "prctl": Check(0, _WORD, (_PR_SET_SECCOMP,), _only(1, (_MODE_FILTER,)), _only(0, _PRCTLS)),
        "seccomp": _only(1, (0,)),  # no listeners, who would answer for the kernel
        "mmap": _only(3, (0,), mask=_MAP_HUGETLB),
        "memfd_create": _only(1, (0,), mask=_MFD_HUGETLB),
        "madvise": _not(2, (_MADV_MERGEABLE,)),
        "setsockopt": _not(2, _SOCKET_PROGRAMS),
    }
    # without a uid and a pid namespace of its own a session could take the daemon's limits, cores and priority
    own = _only(0, (0, PID))
    for name in ("prlimit64", "sched_setaffinity", "sched_setscheduler", "sched_setparam", "sched_setattr"):
        rules[name] = own
    rules["setpriority"] = Check(0, _WORD, (_PRIO_PROCESS,), _only(1, (0, PID)), EPERM)
    rules["ioprio_set"] = Check(0, _WORD, (_IOPRIO_WHO_PROCESS,), _only(1, (0, PID)), EPERM)
    rules.update(_socket_rules(unix_sockets))
    rules.update(_signal_rules() if own_signals_only else {})
    rules.update(_file_rules() if own_files_only else {})
    return rules


def _socket_rules(unix_sockets: bool) -> Dict[str, Action]:
    if unix_sockets:
        family = _only(0, (_AF_UNIX,), EACCES)
        return {"socket": family, "socketpair": family}
    # a datagram socket of a pair can send to any other address: only those that can't change their peer
    kind = _only(1, (_SOCK_STREAM, _SOCK_SEQPACKET), EACCES, _SOCK_TYPE_MASK)
    refused = dict.fromkeys(("socket", "bind", "listen", "accept", "accept4", "connect"), EACCES)
    return {**refused, "socketpair": Check(0, _WORD, (_AF_UNIX,), kind, EACCES)}


def _signal_rules() -> Dict[str, Action]:
    own = _only(0, (PID,))
    rules: Dict[str, Action] = dict.fromkeys(("kill", "tkill", "tgkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo"), own)
    rules.update(pidfd_open=EPERM, pidfd_send_signal=EPERM)
    return rules


def _file_rules() -> Dict[str, Action]:
    rules: Dict[str, Action] = {**dict.fromkeys(_STRAY, EPERM), **dict.fromkeys(_IDLE, IDLE)}
    # before its third version Landlock also lets through who empties a file without asking to write it
    for name, arg in (("open", 1), ("openat", 2)):
        rules[name] = Check(arg, _ACCESS_AND_TRUNC, _STRAY_TRUNCS, EPERM, ALLOW)
    rules["openat2"] = ENOSYS  # its flags lie in memory
    return rules


def build(
    *, unix_sockets: bool, own_signals_only: bool = False, own_files_only: bool = False, machine: str = ""
) -> bytes:
    """Make the filter.

    Args:
        unix_sockets: Allow AF_UNIX sockets. Otherwise there are connected pairs only, that reach nobody else.
        own_signals_only: Allow signals to the installing process only, not even to its children.
        own_files_only: Refuse to change owner and attributes of files, to watch them, and to empty one without opening
            it for writing; changes of mode and times have no effect. Where others' files have the caller's user, only
            Landlock stands before them, and it knows nothing of these.
        machine: As ``uname`` names it; "": this one.

    Returns:
        ``struct sock_filter`` s.

    Raises:
        OSError: ENOSYS: system calls of this machine are not known here.
    """
    machine = machine or os.uname().machine
    if machine not in syscalls.MACHINES:
        raise OSError(errno.ENOSYS, "no table of system calls for %s" % machine)
    rules = _rules(unix_sockets, own_signals_only, own_files_only)
    program = [_step(_LD, _AT_ARCH), _step(_JEQ, syscalls.ARCHES[machine], 1), _step(_RET, KILL)]
    return b"".join([*program, _step(_LD, _AT_NUMBER), *_tree(_segments(rules, machine))])


def _segments(rules: Dict[str, Action], machine: str) -> List[Tuple[int, Action]]:
    """Give the first number of each run of calls that are decided alike, in order."""
    numbers = {syscalls.number(name, machine): rules.get(name, ALLOW) for name in syscalls.TABLE}
    actions: List[Tuple[int, Action]] = [(nr, numbers.get(nr, EPERM)) for nr in range(syscalls.NEWEST + 1)]
    # libc falls back from what a kernel lacks, and does not from what it forbids
    actions.append((syscalls.NEWEST + 1, ENOSYS))
    if machine == "x86_64":
        actions.append((_X32, KILL))
    return [segment for at, segment in enumerate(actions) if at == 0 or segment[1] != actions[at - 1][1]]


def _tree(segments: List[Tuple[int, Action]]) -> List[bytes]:
    """Search the number by halves: a program that runs few steps is also installed faster."""
    if len(segments) == 1:
        return _steps(segments[0][1])
    middle = len(segments) // 2
    below, above = _tree(segments[:middle]), _tree(segments[middle:])
    at = segments[middle][0]
    if len(below) <= _MAX_JUMP:
        return [_step(_JGE, at, len(below)), *below, *above]
    return [_step(_JGE, at, 0, 1), _step(_JA, len(below)), *below, *above]


def _steps(action: Action) -> List[bytes]:
    if isinstance(action, int):
        return [_step(_RET, action)]
    listed, otherwise = _steps(action.listed), _steps(action.otherwise)
    load = [_step(_LD, _AT_ARGS + 8 * action.arg)]
    mask = [_step(_AND, action.mask)] if action.mask != _WORD else []
    last = len(action.values) - 1
    jumps = [_step(_JEQ, value, last - at + len(otherwise)) for at, value in enumerate(action.values)]
    return [*load, *mask, *jumps, *otherwise, *listed]


def _step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return _INSTRUCTION.pack(code, if_true, if_false, value)


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_char_p)]


_LIBC = ctypes.CDLL(None, use_errno=True)
_SECCOMP = syscalls.number("seccomp")
_SET_MODE_FILTER = 1


def install(program: bytes, pid: Optional[int] = None) -> None:
    """Put this thread and all that it starts under a filter, for good. ``no_new_privs`` must be set.

    Args:
        program: Of ``build``.
        pid: The caller's, which the filter's exceptions for itself are for; None: there are none.

    Raises:
        OSError: The kernel refuses.
    """
    if pid is not None:
        program = program.replace(_PID_BYTES, struct.pack("=I", pid))
    argument = ctypes.byref(_Program(len(program) // _INSTRUCTION.size, program))
    if _SECCOMP is not None and _LIBC.syscall(_SECCOMP, _SET_MODE_FILTER, 0, argument) == 0:
        return
    # the older way in, which some outer filters leave open
    if _LIBC.prctl(_PR_SET_SECCOMP, _MODE_FILTER, argument, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, "seccomp: %s" % os.strerror(number))
