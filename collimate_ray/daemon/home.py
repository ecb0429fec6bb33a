"""The daemon's private directory: its lock, and the directories of sessions that have no file system of their own.

Must not start or end processes. Layout, all of it gone at exit::

    <socket>.d/            0700, locked by the living daemon
      admin.sock           the admin socket
      root/                empty: where a zygote mounts the root of its sessions, in its own mount namespace
      w/<session>/work     where an exec runs, owned by the session's uid
      w/<session>/tmp      its private directory for temporary files
      gone/                directories of dead sessions, being removed
"""

from __future__ import annotations

import fcntl
import itertools
import os
import stat
import tempfile
import zlib
from dataclasses import dataclass
from pathlib import Path

from collimate_ray.config import private_dir
from collimate_ray.daemon.settings import MAX_SESSIONS
from collimate_ray.errors import ConfigError

#: Uids of sessions start here: above what distributions give to people and services.
_FIRST_UID = 200_000
#: Daemons of one machine take one of so many ranges by the hash of their directory: two hardly ever meet.
_UID_RANGES = 60_000


@dataclass(frozen=True)
class Place:
    """The directories of one session: ``work`` and ``tmp`` lie below ``top``."""

    top: Path
    work: Path
    tmp: Path


class Home:
    """The private directory, held for a daemon's life.

    Args:
        root: Where it stands; its parent must exist.

    Raises:
        ConfigError: Another daemon lives there, or the directory can't be made.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.digest = f"{zlib.crc32(os.fsencode(root)):08x}"
        self.first_uid = _FIRST_UID + MAX_SESSIONS * (int(self.digest, 16) % _UID_RANGES)
        self._outside = Path(tempfile.gettempdir()) / f"collimate-{os.getuid()}-{self.digest}"
        self._lock = _lock_dir(root)
        self.namespaces = False
        self.own_uids = False
        self._count = itertools.count(1)
        self.empty()

    def empty(self) -> None:
        """Remove what an earlier life left, and make the directories afresh."""
        self._clear()
        for name in ("w", "gone", "root"):
            (self.root / name).mkdir(mode=0o711)

    def _clear(self) -> None:
        for path in list(self.root.iterdir()):
            remove_tree(path)
        remove_tree(self._outside)

    def set_fence(self, *, namespaces: bool, own_uids: bool) -> None:
        """Say how sessions are fenced in: it decides where their directories stand and who owns them.

        Args:
            namespaces: Each mounts its own, and needs none here.
            own_uids: Each has a uid of its own.
        """
        self.namespaces, self.own_uids = namespaces, own_uids
        if own_uids and not namespaces and not self._outside.exists():
            # sessions of another uid can't pass the private directory, so theirs stand beside it, unlistable
            self._outside.mkdir(mode=0o711)

    def uid_of(self, slot: int) -> int | None:
        """Give the uid of a session: no other process of the machine has it, or none in its user namespace; or None."""
        return self.first_uid + slot if self.own_uids or self.namespaces else None

    def in_uid_range(self, uid: int) -> bool:
        """Tell whether ``uid`` is one that this daemon gives to sessions, if it gives them any."""
        return self.first_uid <= uid < self.first_uid + MAX_SESSIONS

    def is_session_uid(self, uid: int) -> bool:
        """Tell whether ``uid`` is that of a session of this daemon."""
        return self.own_uids and self.in_uid_range(uid)

    def make_place(self, name: str, uid: int | None) -> Place:
        """Make the directories of a session.

        Raises:
            OSError: The disk is full, or there is no descriptor left.
        """
        top = (self._outside if self.own_uids else self.root / "w") / name
        place = Place(top, top / "work", top / "tmp")
        for path in (top, place.work, place.tmp):
            path.mkdir(mode=0o700)
            if uid is not None:
                os.chown(path, uid, uid)
        return place

    def retire(self, place: Place) -> Path:
        """Move a dead session's directories out of the way; remove the returned path with ``remove_tree``."""
        target = self.root / "gone" / str(next(self._count))
        try:
            place.top.rename(target)
        except OSError:  # another file system, or no room for a name: removed where it stands
            return place.top
        return target

    def close(self) -> None:
        """Remove everything and let the lock go."""
        self._clear()
        self.root.rmdir()
        os.close(self._lock)


def _lock_dir(root: Path) -> int:
    while True:
        private_dir(root)
        handle = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            raise ConfigError(f"serve: already served: another daemon holds {root}") from None
        # a daemon that just ended may have removed the directory between our open and our lock
        if root.exists() and root.stat().st_ino == os.fstat(handle).st_ino:
            return handle
        os.close(handle)


def remove_tree(top: Path) -> None:
    """Remove a tree however deep it is and whatever its modes: one descriptor, no recursion, no long path.

    No process may live in it: the way back up is trusted. Links are not followed.
    """
    if not os.path.lexists(top):
        return
    if not stat.S_ISDIR(os.lstat(top).st_mode):
        top.unlink()
        return
    os.chmod(top, 0o700)
    here = os.open(top.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        pending = [[top.name]]  # for each level down to here, the directories that are still to go
        while pending[0]:
            if pending[-1]:
                here = _move(here, pending[-1][-1])
                pending.append(_empty(here))
            else:
                pending.pop()
                here = _move(here, "..")
                os.rmdir(pending[-1].pop(), dir_fd=here)
    finally:
        os.close(here)


def _move(here: int, name: str) -> int:
    there = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=here)
    os.close(here)
    return there


def _empty(here: int) -> list[str]:
    """Unlink all but the directories, open those for their owner, and give their names."""
    names = []
    with os.scandir(here) as entries:
        for entry in list(entries):
            if entry.is_dir(follow_symlinks=False):
                os.chmod(entry.name, 0o700, dir_fd=here)
                names.append(entry.name)
            else:
                os.unlink(entry.name, dir_fd=here)
    return names
