"""Cgroups of sessions: limits of memory and processes over all that an exec starts, and a small share of the processor.

One group for each number of a session, made at its first use and kept open for the next. Both of Linux's versions. Must
not move a process but this one, and that only where it is alone in its group. Sources: the kernel's
``admin-guide/cgroup-v1/memory.rst`` and ``admin-guide/cgroup-v2.rst``, cgroups(7). Layout::

    <own group>/collimate-<name>/<slot>                   version 1, in the tree of each controller
    <own group or its parent>/collimate-<name>/<slot>     version 2
    <the same>/warm                                       zygotes, and what they fork until it joins its slot's group

The living daemon holds a lock on ``collimate-<name>``: who gets it finds a dead one's.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from collimate_ray.jail.process import send_signal

_log = logging.getLogger(__name__)

_PREFIX = "collimate-"
# the kernel fills a new directory with files, and takes them away with it: a recorded tree is a stand-in for both
_make_dir: Callable[[Path], None] = os.mkdir
_remove_dir: Callable[[Path], None] = os.rmdir

#: The longest that killed processes may take to go, s: one that writes to a slow disk goes late.
_GONE_S = 10.0
_PAUSE_S = 0.002


class CgroupsUnusable(Exception):
    """Why this machine gives no cgroups: one line, for people."""


@dataclass(frozen=True)
class _Files:
    """Names of the files of one version.

    Attributes:
        version: 1 or 2.
        memory: Limits, the narrower before the wider.
        events: Counts what was killed for memory.
        cpu: The share of the processor, what it is set to for the daemon's sessions together, of 1024 or 100, which
            everybody else's group has, and for zygotes among them.
    """

    version: int
    memory: tuple[str, ...]
    events: str
    cpu: tuple[str, bytes, bytes]


#: 64 of 1024 (design: Ray), and as much of 100; eight slots' share for zygotes, whom all slots wait for.
_V1 = _Files(
    1,
    ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes"),
    "memory.oom_control",
    ("cpu.shares", b"64", b"8192"),
)
_V2 = _Files(2, ("memory.max",), "memory.events", ("cpu.weight", b"6", b"800"))
_WARM = "warm"
_PIDS_MAX, _PROCS, _SUBTREE, _KILL = "pids.max", "cgroup.procs", "cgroup.subtree_control", "cgroup.kill"
#: In the order in which their trees are filled; they are emptied from the last on, so that forks end first.
_CONTROLLERS = ("memory", "cpu", "pids")
#: The two without which there is no group.
_NEEDED = ("memory", "pids")


@dataclass(frozen=True)
class _Mount:
    """A mounted hierarchy: its place, which of its directories is shown there, its controllers (version 1)."""

    at: Path
    root: str
    options: frozenset[str]


class Group:
    """The cgroup of one slot: its files, open.

    Args:
        files: Of this version.
        paths: Its directory in the tree of each controller; version 2 has one for all.
    """

    def __init__(self, files: _Files, paths: dict[str, Path]) -> None:
        self._files, self._paths = files, list(dict.fromkeys(paths.values()))
        #: limits in force; None: not known
        self._set: tuple[int, int] | None = None
        self._memory_mib = sys.maxsize
        self._open: list[int] = []
        memory = paths["memory"]
        try:
            #: open for writing; a process joins by writing ``0`` to each
            self.join_fds = [self._opened(path / _PROCS, os.O_WRONLY) for path in self._paths]
            names = [name for name in files.memory if (memory / name).exists()]
            self._memory = [self._opened(memory / name, os.O_WRONLY) for name in names]
            self._pids = self._opened(paths["pids"] / _PIDS_MAX, os.O_WRONLY)
            self._events = self._opened(memory / files.events, os.O_RDONLY)
            if (memory / "memory.swap.max").exists():
                _write(memory / "memory.swap.max", b"0")
        except OSError:
            self.close()
            raise

    def set(self, memory_mib: int, processes: int) -> None:
        """Set its limits; what stands already is not written again.

        Args:
            memory_mib: Of all its processes together, their files in memory counted, MiB.
            processes: Threads are counted too.

        Raises:
            OSError: What its processes hold can't be brought below the limit (EBUSY).
        """
        if self._set == (memory_mib, processes):
            return
        self._set = None
        # memory alone never stands above memory and swap together
        for fd in self._memory if memory_mib < self._memory_mib else reversed(self._memory):
            os.pwrite(fd, b"%d" % (memory_mib << 20), 0)
        self._memory_mib = memory_mib
        os.pwrite(self._pids, b"%d" % processes, 0)
        self._set = (memory_mib, processes)

    def oom_kills(self) -> int:
        """Count the processes that were killed for memory since the group was made."""
        words = os.pread(self._events, 4096, 0).split()
        return int(words[words.index(b"oom_kill") + 1]) if b"oom_kill" in words else 0

    def kill(self) -> None:
        """Kill all that is in it; what the kernel has not let go yet may stand there for a while."""
        self._set = None
        for path in reversed(self._paths):
            _kill(path)

    def close(self) -> None:
        """Close its files."""
        while self._open:
            os.close(self._open.pop())

    def _opened(self, path: Path, how: int) -> int:
        self._open.append(os.open(path, how | os.O_CLOEXEC))
        return self._open[-1]


class Cgroups:
    """All cgroups of a daemon.

    Args:
        files: Of the version in use.
        tops: The daemon's directory in the tree of each controller.
        lock: Held on the first of them.
    """

    def __init__(self, files: _Files, tops: dict[str, Path], lock: int) -> None:
        self._files, self._tops, self._lock = files, tops, lock
        self._groups: dict[int, Group] = {}
        #: open for writing: a zygote joins by writing ``0`` to each
        self.warm_fds: list[int] = []

    @classmethod
    def open(cls, name: str, root: Path = Path("/")) -> Cgroups:
        """Find where groups can be made, and remove what dead daemons left there.

        Args:
            name: Of the daemon, for a directory: the digest of its home.
            root: Where ``proc/self`` is read, and mounts are looked for.

        Raises:
            CgroupsUnusable: There is no such place.
        """
        try:
            mounts, own = _mounts(root), _own(root)
            files, places = _v1(mounts, own) if "memory" in own else _v2(mounts, own)
            _sweep(list(dict.fromkeys(mount for mount, _ in places.values())))
            return cls._made(files, {kind: place / f"{_PREFIX}{name}" for kind, (_, place) in places.items()})
        except OSError as error:
            reason = f"{error.filename or 'cgroup'}: {os.strerror(error.errno or 0)}"
            raise CgroupsUnusable(f"cgroups: expected to make groups of our own, found {reason}") from error

    @classmethod
    def _made(cls, files: _Files, tops: dict[str, Path]) -> Cgroups:
        lock = _make_locked(tops["memory"])
        cgroups = cls(files, tops, lock)
        try:
            for top in cgroups._distinct():
                _make(top)
            if files is _V2:
                _enable(tops["memory"], tops)
            if "cpu" in tops:
                cgroups._share(tops["cpu"])
            cgroups.group(0).set(1, 1)  # a limit that can't be set is found now
        except OSError:
            cgroups.close()
            raise
        return cgroups

    @property
    def parts(self) -> tuple[str, ...]:
        """Short names of what is in force, for health."""
        return tuple(f"cgroup{self._files.version}-{kind}" for kind in self._tops)

    def _share(self, top: Path) -> None:
        """Let all have a small share of the processor, and zygotes the most of that."""
        name, of_all, of_warm = self._files.cpu
        _write(top / name, of_all)
        _make(top / _WARM)
        _write(top / _WARM / name, of_warm)
        self.warm_fds.append(os.open(top / _WARM / _PROCS, os.O_WRONLY | os.O_CLOEXEC))

    def group(self, slot: int) -> Group:
        """Give the group of a slot; the same object each time.

        Raises:
            OSError: It can't be made.
        """
        if slot not in self._groups:
            paths = {kind: top / str(slot) for kind, top in self._tops.items()}
            for path in dict.fromkeys(paths.values()):
                _make(path)
            self._groups[slot] = Group(self._files, paths)
        return self._groups[slot]

    def close(self) -> None:
        """Kill what is left in the groups, and remove them."""
        for group in self._groups.values():
            group.close()
        self._groups.clear()
        while self.warm_fds:
            os.close(self.warm_fds.pop())
        for top in reversed(self._distinct()):  # the one with the lock goes last
            _remove(top)
        os.close(self._lock)

    def _distinct(self) -> list[Path]:
        return list(dict.fromkeys(self._tops.values()))


def _v1(mounts: list[_Mount], own: dict[str, str]) -> tuple[_Files, dict[str, tuple[Path, Path]]]:
    places = {}
    for kind in _CONTROLLERS:
        mount = next((mount for mount in mounts if kind in mount.options), None)
        if kind in own and mount is not None:
            places[kind] = (mount.at, _below(mount, own[kind]))
        elif kind in _NEEDED:
            raise CgroupsUnusable(f"cgroups: expected that the {kind} controller is mounted, found that it is not")
    return _V1, places


def _v2(mounts: list[_Mount], own: dict[str, str]) -> tuple[_Files, dict[str, tuple[Path, Path]]]:
    mount = next((mount for mount in mounts if "cgroup2" in mount.options), None)
    if mount is None or "" not in own:
        raise CgroupsUnusable("cgroups: expected that cgroup2 is mounted, found that neither version is")
    place, given = _v2_place(mount, _below(mount, own[""]))
    return _V2, {kind: (mount.at, place) for kind in _CONTROLLERS if kind in given}


def _v2_place(mount: _Mount, own: Path) -> tuple[Path, list[str]]:
    """Find a group whose children have controllers: one with processes in it gives them none (but the topmost)."""
    available = (own / "cgroup.controllers").read_text().split()
    lacking = [kind for kind in _NEEDED if kind not in available]
    if lacking:
        found = ", ".join(available) or "none"
        raise CgroupsUnusable(f"cgroups: expected the {lacking[0]} controller in {own}, found {found}")
    if _enough(_given(own)):
        return own, _given(own)
    if (own / _PROCS).read_text().split() == [str(os.getpid())]:
        _make(own / "daemon")
        _write(own / "daemon" / _PROCS, b"0")
        _enable(own, [kind for kind in _CONTROLLERS if kind in available])
        return own, available
    if own != mount.at and not _bounded(own) and _enough(_given(own.parent)):
        return own.parent, _given(own.parent)  # groups beside our own escape no limit of it
    raise CgroupsUnusable(
        f"cgroups: expected a group of the daemon's own, found {own} with other processes in it, which can't give "
        "controllers to a child; start the daemon by: systemd-run --scope -p Delegate=yes (with --user if not root)"
    )


def _given(path: Path) -> list[str]:
    return (path / _SUBTREE).read_text().split()


def _enough(kinds: list[str]) -> bool:
    return all(kind in kinds for kind in _NEEDED)


def _bounded(path: Path) -> bool:
    return any((path / name).read_text().strip() != "max" for name in ("memory.max", _PIDS_MAX))


def _enable(place: Path, kinds: Iterable[str]) -> None:
    _write(place / _SUBTREE, " ".join(f"+{kind}" for kind in kinds).encode("ascii"))


def _own(root: Path) -> dict[str, str]:
    """Give this process's group in the tree of each controller; version 2's controller is ""."""
    found = {}
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        _, kinds, path = line.split(":", 2)
        found.update(dict.fromkeys(kinds.split(","), path))
    return found


def _mounts(root: Path) -> list[_Mount]:
    """List the mounted hierarchies."""
    found = []
    for line in (root / "proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ", 2)
        if kind in ("cgroup", "cgroup2"):
            shown, at = map(_unescaped, before.split(" ")[3:5])
            known = options.split(",") if kind == "cgroup" else ["cgroup2"]
            found.append(_Mount(root / at.lstrip("/"), shown, frozenset(known)))
    return found


def _unescaped(text: str) -> str:
    return re.sub(r"\\(\d{3})", lambda found: chr(int(found[1], 8)), text)


def _below(mount: _Mount, group: str) -> Path:
    """Give a group's directory."""
    shown = mount.root.rstrip("/")
    if group != shown and not group.startswith(shown + "/"):
        raise CgroupsUnusable(f"cgroups: expected our own group {group} at {mount.at}, found {mount.root} there")
    return mount.at / group[len(shown) :].lstrip("/")


def _make(path: Path) -> None:
    with contextlib.suppress(FileExistsError):
        _make_dir(path)


def _make_locked(top: Path) -> int:
    """Make a daemon's directory and hold it; who sweeps may hold it for a moment, and take it away."""
    deadline = time.monotonic() + _GONE_S
    while time.monotonic() < deadline:
        _make(top)
        lock = _locked(top)
        if lock is not None:
            with contextlib.suppress(FileNotFoundError):
                if os.stat(top).st_ino == os.fstat(lock).st_ino:
                    return lock
            os.close(lock)
        time.sleep(_PAUSE_S)
    raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(top))


def _locked(path: Path) -> int | None:
    """Lock a daemon's directory; None: another has it, or it is gone."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        return None
    return handle


def _sweep(mounts: list[Path]) -> None:
    """Remove what dead daemons left, wherever they ran.

    Args:
        mounts: That which has the locks first. It is listed last: who stands in another stood there before.
    """
    found = {mount: _daemons_in(mount) for mount in reversed(mounts)}
    locks = {path: _locked(path) for path in found[mounts[0]]}
    living = {path.name for path, lock in locks.items() if lock is None}
    for path in (path for paths in found.values() for path in paths):
        if path.name not in living:
            _log.warning("removing %s, which a dead daemon left", path)
            _remove(path)
    for lock in locks.values():
        if lock is not None:
            os.close(lock)


def _daemons_in(mount: Path) -> list[Path]:
    """List the directories of daemons of this user."""
    found = []
    for where, names, _ in os.walk(mount):
        found += [path for path in (Path(where, name) for name in names) if _is_daemon(path)]
        names[:] = [name for name in names if not name.startswith(_PREFIX)]
    return found


def _is_daemon(path: Path) -> bool:
    try:
        return path.name.startswith(_PREFIX) and path.stat().st_uid == os.geteuid()
    except FileNotFoundError:
        return False


def _remove(top: Path) -> None:
    """Kill what is in a daemon's groups, and remove them when it is gone."""
    deadline = time.monotonic() + _GONE_S
    for where, _, _ in os.walk(top, topdown=False):
        while not _removed(Path(where)):
            if time.monotonic() > deadline:
                _log.error("%s: expected that its killed processes end, found some after %g s", where, _GONE_S)
                return
            time.sleep(_PAUSE_S)


def _removed(path: Path) -> bool:
    try:
        _kill(path)
        _remove_dir(path)
    except FileNotFoundError:
        return True
    except OSError as error:
        if error.errno != errno.EBUSY:
            raise
        return False
    return True


def _kill(path: Path) -> None:
    """Kill the processes of a group."""
    if (path / _PIDS_MAX).exists():
        _write(path / _PIDS_MAX, b"0")  # no fork outruns what follows
    if (path / _KILL).exists():
        _write(path / _KILL, b"1")
        return
    for pid in map(int, (path / _PROCS).read_text().split()):
        if pid > 0:  # 0: one that this pid namespace does not see
            send_signal(pid, signal.SIGKILL)


def _write(path: Path, text: bytes) -> None:
    handle = os.open(path, os.O_WRONLY)
    try:
        os.write(handle, text)
    finally:
        os.close(handle)
