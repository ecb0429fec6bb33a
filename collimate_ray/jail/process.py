"""System calls that fence a process in: limits, capabilities, uids, and the sweep of what is left.

Joined as text into the runner's source, so: standard library only, Python 3.8+, top-level
functions only. Must not decide who is fenced in. Sources: prctl(2), capabilities(7), getrlimit(2).
"""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
import stat
import sys

_LIBC = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_CAPBSET_DROP = 1, 4, 24
_PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 36, 38
_CAPS_VERSION_3 = 0x20080522
#: CAP_CHOWN 0, CAP_DAC_OVERRIDE 1, CAP_FOWNER 3, CAP_KILL 5, CAP_SETGID 6, CAP_SETUID 7.
_KEPT_CAPABILITIES = 0b11101011

#: Highest number of a process that Linux gives by default.
_MOST_PIDS = 32768


def _prctl(option: int, value: int) -> None:
    if _LIBC.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl %d" % option)


def harden_keeper() -> None:
    """Make this process non-dumpable: no process of another uid, or without CAP_SYS_PTRACE, reads its memory."""
    _prctl(_PR_SET_DUMPABLE, 0)


def set_dumpable() -> None:
    """Make this process dumpable again: its own ``/proc/self`` then works after a change of uid."""
    _prctl(_PR_SET_DUMPABLE, 1)


def die_with_parent() -> None:
    """Ask for SIGKILL when the parent (thread) dies; a later change of uid takes it back, so ask after that."""
    _prctl(_PR_SET_PDEATHSIG, 9)


def become_subreaper() -> None:
    """Make orphans below this process its children."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def sweep_children(spare: int = 0) -> None:
    """Kill and reap all below this process (a subreaper, else its children only) until nothing is left.

    Without ``/proc``, all else in a session's own pid namespace goes, and nothing in another.

    Args:
        spare: A child that is left alone, or 0.
    """
    find = signal_tree if os.path.exists("/proc/self") else _signal_namespace
    while _has_children():
        # stopped first: a dead process makes room for the next fork of a bomb, a stopped one does not
        seen = find(os.getpid(), 19, spare)
        for pid in seen:
            send_signal(pid, 9)
        try:
            for _ in seen:
                os.waitpid(-1, 0)
        except ChildProcessError:
            return
        if not seen:
            return


def _has_children() -> bool:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def signal_tree(top: int, number: int, spare: int = 0) -> set[int]:
    """Signal all below a process, but for one to spare and what is below it, until no new one shows up; give them."""
    seen: set[int] = set()
    fresh = {top}
    while fresh:
        fresh = {child for pid in (top, *seen) for child in child_pids(pid)} - seen - {spare}
        for pid in fresh:
            send_signal(pid, number)
        seen |= fresh
    return seen


def _signal_namespace(top: int, number: int, spare: int) -> set[int]:
    """Signal all in this pid namespace but its first process, ``top`` and its parent; give them.

    Without ``/proc`` processes can only be found by trying their numbers. The namespace is a session's own if its first
    process belongs to a process group outside of it, as one that was forked from there and started no group of its own.
    """
    if os.getpgid(1) != 0:
        return set()
    kept = {0, 1, top, os.getppid(), spare}
    seen: set[int] = set()
    last = _latest_pid()
    while True:
        fresh = {pid for pid in range(2, last + 1) if pid not in kept and pid not in seen and _is_there(pid, number)}
        if not fresh and (seen or last == _MOST_PIDS or not _has_children()):
            return seen
        seen |= fresh
        # nothing found, and yet there are children: the numbers began anew since they were given out
        last = last if fresh else _MOST_PIDS


def _latest_pid() -> int:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    return pid


def _is_there(pid: int, number: int) -> bool:
    try:
        os.kill(pid, number)
    except OSError:
        return False
    return True


def send_signal(pid: int, number: int) -> None:
    """Send a signal to a process that may be gone."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


def child_pids(parent: int) -> list[int]:
    """List the children of a process, zombies included, in no order."""
    found: list[int] = []
    try:
        for task in os.listdir("/proc/%d/task" % parent):
            with open("/proc/%d/task/%s/children" % (parent, task)) as listing:
                found.extend(map(int, listing.read().split()))
    except OSError:  # the process or the thread just ended, or the kernel lacks CONFIG_PROC_CHILDREN
        me = os.getpid()
        if not os.path.exists("/proc/%d/task/%d/children" % (me, me)):
            return [pid for pid in _all_pids() if _parent_of(pid) == parent]
    return found


def _all_pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _parent_of(pid: int) -> int:
    try:
        with open("/proc/%d/stat" % pid, "rb") as status:
            # the name, in parentheses, may hold anything, spaces and parentheses too
            return int(status.read().rpartition(b")")[2].split()[1])
    except OSError:
        return 0


def no_new_privs() -> None:
    """Take set-uid programs and file capabilities their power, for this process and its children, for ever."""
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)


def _empty_bounding_set() -> None:
    # EPERM: CAP_SETPCAP is gone, and whoever dropped it did this first; EINVAL: past the last one
    for cap in range(64):
        if _LIBC.prctl(_PR_CAPBSET_DROP, ctypes.c_ulong(cap), 0, 0, 0) != 0:
            return


def drop_capabilities() -> None:
    """Drop every capability for good, uid kept: root without them is an ordinary owner of root's files."""
    _empty_bounding_set()
    no_new_privs()
    header = (ctypes.c_uint32 * 2)(_CAPS_VERSION_3, 0)
    if _LIBC.capset(header, (ctypes.c_uint32 * 6)()) != 0:
        raise OSError(ctypes.get_errno(), "capset")


def keep_capabilities(more: int = 0) -> None:
    """Drop every capability but those that make another process another user, own its files, and kill it."""
    _empty_bounding_set()
    header = (ctypes.c_uint32 * 2)(_CAPS_VERSION_3, 0)
    # lower words of effective, permitted, inheritable, then the upper ones
    data = (ctypes.c_uint32 * 6)()
    _LIBC.capget(header, data)
    kept = data[1] & (_KEPT_CAPABILITIES | more)
    if _LIBC.capset(header, (ctypes.c_uint32 * 6)(kept, kept, 0, 0, 0, 0)) != 0:
        raise OSError(ctypes.get_errno(), "capset")


def drop_to(uid: int) -> None:
    """Become ``uid`` (and the group of that number) for good: no groups, no capabilities, no new privileges."""
    _empty_bounding_set()
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    no_new_privs()
    set_dumpable()


def blocked_at(path: str) -> str:
    """Give the topmost directory on the way to ``path`` that another uid can't traverse, or ""."""
    walked = "/"
    for part in os.path.abspath(path).split("/")[1:]:
        if not os.stat(walked).st_mode & stat.S_IXOTH:
            return walked
        walked = os.path.join(walked, part)
    return "" if os.stat(path).st_mode & stat.S_IXOTH else path


def interpreter_dirs() -> list[str]:
    """Give the directories that this interpreter lives in, links resolved too, shortest first."""
    named = [sys.prefix, sys.base_prefix, sys.exec_prefix, os.path.dirname(os.__file__)]
    every = set(named) | {os.path.realpath(path) for path in named}
    return sorted((path for path in every if os.path.isdir(path)), key=len)


def interpreter_readable() -> bool:
    """Tell whether another uid can reach and read the interpreter."""
    return not any(blocked_at(path) for path in interpreter_dirs())


def set_limits(
    memory_mib: int | None = None,
    processes: int | None = None,
    files: int | None = None,
    file_mib: int | None = None,
    own_uid: bool = False,
) -> None:
    """Lower resource limits of this process and its children; never raises one.

    Args:
        memory_mib: Address space beyond what is mapped now, MiB a process.
        processes: Processes and threads of this uid; set only with ``own_uid``, since it counts all of a uid's.
        files: Open descriptors of a process.
        file_mib: Size of one written file, MiB.
        own_uid: True if no other session runs under the uid that this process has or is going to have.
    """
    _lower(resource.RLIMIT_CORE, 0)
    if memory_mib is not None:
        _lower(resource.RLIMIT_AS, _mapped() + (memory_mib << 20))
    if processes is not None and own_uid:
        _lower(resource.RLIMIT_NPROC, processes)
    if files is not None:
        _lower(resource.RLIMIT_NOFILE, files)
    if file_mib is not None:
        _lower(resource.RLIMIT_FSIZE, file_mib << 20)


def _mapped() -> int:
    """Give the bytes that are mapped; without ``/proc`` by trial: the least limit for one page more."""
    try:
        statm = os.open("/proc/self/statm", os.O_RDONLY)
        pages = int(os.read(statm, 64).split()[0])
        os.close(statm)
        return pages * mmap.PAGESIZE
    except FileNotFoundError:
        pass
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    low, high = 0, 1 << 47 if hard == resource.RLIM_INFINITY else hard
    while high - low > 1 << 20:
        middle = (low + high) // 2
        try:
            resource.setrlimit(resource.RLIMIT_AS, (middle, hard))
            mmap.mmap(-1, mmap.PAGESIZE).close()
            high = middle
        except (OSError, MemoryError):  # or the interpreter's own
            low = middle
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    return high


def _lower(which: int, value: int) -> None:
    hard = resource.getrlimit(which)[1]
    limit = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(which, (limit, limit))
