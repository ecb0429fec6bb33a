"""System calls that fence a process in: limits, mounts, capabilities, uids, and the sweep of what is left.

Joined as text into the runner's source and the daemon's exec program, so: standard library only, Python 3.8+, top-level
functions only. Must not decide who is fenced in. Sources: prctl(2), capabilities(7), mount(2), unshare(2).
"""

from __future__ import annotations

import ctypes
import os
import resource
import stat
import sys

_LIBC = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_CAPBSET_DROP = 1, 4, 24
_PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 36, 38
_CLONE_NEWNS, _CLONE_NEWIPC = 0x00020000, 0x08000000
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_REMOUNT = 1, 2, 4, 32
_MS_BIND, _MS_REC, _MS_PRIVATE = 4096, 16384, 1 << 18
_CAPS_VERSION_3 = 0x20080522

#: Where everybody may write on a Linux machine; each session gets a directory of its own over them.
SHARED_DIRS = ("/tmp", "/var/tmp", "/dev/shm")


def _prctl(option: int, value: int) -> None:
    if _LIBC.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl %d" % option)


def harden_keeper() -> None:
    """Make this process non-dumpable: no process of another uid, or without CAP_SYS_PTRACE, reads its memory."""
    _prctl(_PR_SET_DUMPABLE, 0)


def set_dumpable() -> None:
    """Make this process dumpable again, so that its own ``/proc/self`` works after a change of uid."""
    _prctl(_PR_SET_DUMPABLE, 1)


def die_with_parent() -> None:
    """Ask for SIGKILL when the parent (thread) dies; a later change of uid takes it back, so ask after that."""
    _prctl(_PR_SET_PDEATHSIG, 9)


def become_subreaper() -> None:
    """Make orphans below this process its children."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def sweep_children() -> None:
    """Kill and reap all below this process (a subreaper, else its children only) until nothing is left."""
    while True:
        # stopped first: a dead process makes room for the next fork of a bomb, a stopped one does not
        seen = signal_tree(os.getpid(), 19)
        for pid in seen:
            send_signal(pid, 9)
        try:
            for _ in seen or [0]:
                os.waitpid(-1, 0 if seen else os.WNOHANG)
        except ChildProcessError:
            return


def signal_tree(top: int, number: int) -> set[int]:
    """Signal all below a process until no new one shows up; give them."""
    seen: set[int] = set()
    fresh = {top}
    while fresh:
        fresh = {child for pid in (top, *seen) for child in child_pids(pid)} - seen
        for pid in fresh:
            send_signal(pid, number)
        seen |= fresh
    return seen


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
                found.extend(int(pid) for pid in listing.read().split())
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
    for cap in range(64):
        # EINVAL past the kernel's last capability, EPERM without CAP_SETPCAP: then there is nothing to drop
        _LIBC.prctl(_PR_CAPBSET_DROP, ctypes.c_ulong(cap), 0, 0, 0)


def drop_capabilities() -> None:
    """Drop every capability for good, uid kept: root without them is an ordinary owner of root's files."""
    _empty_bounding_set()
    no_new_privs()
    header = (ctypes.c_uint32 * 2)(_CAPS_VERSION_3, 0)
    if _LIBC.capset(header, (ctypes.c_uint32 * 6)()) != 0:
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


def _mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    args = [os.fsencode(text) for text in (source, target, kind)]
    if _LIBC.mount(args[0], args[1], args[2], ctypes.c_ulong(flags), os.fsencode(options)) != 0:
        raise OSError(ctypes.get_errno(), "mount on %s" % target)


def private_mounts(tmp_dir: str, keep: list[str], work: str = "") -> bool:
    """Enter mount and IPC namespaces of our own, ``tmp_dir`` over the shared directories. Needs CAP_SYS_ADMIN.

    A directory that other uids can't traverse (``/root``) is covered where something to keep lies below, what is kept
    is bound back at its path. ``tmp_dir`` must belong to this uid: mount points are made in it.

    Args:
        tmp_dir: Shown as ``/tmp``, ``/var/tmp`` and ``/dev/shm``.
        keep: Directories that stay readable, read-only where something had to be covered.
        work: A directory that stays writable, or "".

    Returns:
        False if the kernel refuses the namespace; nothing is changed then.
    """
    if _LIBC.unshare(_CLONE_NEWNS | _CLONE_NEWIPC) != 0:
        return False
    _mount("none", "/", "", _MS_REC | _MS_PRIVATE)
    kept = [*keep, work] if work else list(keep)
    shared = [path for path in SHARED_DIRS if os.path.isdir(path)]
    blocked = {blocked_at(path) for path in kept} - {""}
    covers = sorted(path for path in blocked if not _below(path, shared))
    handles = [(path, os.open(path, os.O_PATH | os.O_DIRECTORY)) for path in sorted(kept, key=len)]
    tmp_handle = os.open(tmp_dir, os.O_PATH | os.O_DIRECTORY)  # it may lie below what is covered next
    for path in covers:
        _mount("none", path, "tmpfs", _MS_NOSUID | _MS_NODEV, "mode=755,size=1m")
    for path in shared:
        _mount("/proc/self/fd/%d" % tmp_handle, path, "", _MS_BIND)
    for path, handle in handles:
        if _below(path, covers + shared):
            _bind_back(path, handle, path != work)
        os.close(handle)
    os.close(tmp_handle)
    return True


def _below(path: str, tops: list[str]) -> bool:
    return any(path == top or path.startswith(top + "/") for top in tops)


def _bind_back(path: str, handle: int, read_only: bool) -> None:
    os.makedirs(path, mode=0o755, exist_ok=True)
    _mount("/proc/self/fd/%d" % handle, path, "", _MS_BIND)
    if read_only:
        _mount("none", path, "", _MS_REMOUNT | _MS_BIND | _MS_RDONLY | _MS_NOSUID)


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
        with open("/proc/self/statm") as statm:
            mapped = int(statm.read().split()[0]) * resource.getpagesize()
        _lower(resource.RLIMIT_AS, mapped + (memory_mib << 20))
    if processes is not None and own_uid:
        _lower(resource.RLIMIT_NPROC, processes)
    if files is not None:
        _lower(resource.RLIMIT_NOFILE, files)
    if file_mib is not None:
        _lower(resource.RLIMIT_FSIZE, file_mib << 20)


def _lower(which: int, value: int) -> None:
    hard = resource.getrlimit(which)[1]
    limit = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(which, (limit, limit))
