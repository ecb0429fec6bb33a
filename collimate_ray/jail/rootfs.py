"""The read-only root that sessions see, and what each session mounts over it.

Built by the zygote in its own mount namespace: the interpreter, the system's programs and libraries, a handful of
devices, and nothing else of the machine. Must not start or judge anything. Sources: mount(2), mount_namespaces(7),
user_namespaces(7) ("restrictions on mount namespaces"); measurements: notes/SANDBOX.md.
"""

from __future__ import annotations

import errno
import os
from typing import List

from . import kernel
from .kernel import MS_BIND, MS_NODEV, MS_NOEXEC, MS_NOSUID, MS_PRIVATE, MS_RDONLY, MS_REC, MS_REMOUNT

#: What programs and libraries of every distribution stand in.
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
#: Of /etc: what the loader, the clock and the links of Debian's programs need. No names of people, hosts or keys.
_ETC = ("ld.so.cache", "ld.so.conf", "ld.so.conf.d", "localtime", "timezone", "alternatives", "mime.types")
_WRITTEN = {
    "passwd": "root:x:0:0::/:/bin/sh\nsandbox:x:65533:65533::/box/work:/bin/sh\nnobody:x:65534:65534::/:/bin/sh\n",
    "group": "root:x:0:\nsandbox:x:65533:\nnogroup:x:65534:\n",
    "hosts": "127.0.0.1 localhost\n",
}
_DEVICES = ("null", "zero", "full", "random", "urandom")
_DEVICE_LINKS = {"fd": "/proc/self/fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2", "shm": "/tmp"}
#: Where a session works and what its /tmp is, in a private file system.
BOX, WORK, _TMP = "/box", "/box/work", "/box/tmp"
_READ_ONLY = MS_RDONLY | MS_NOSUID


def readable() -> List[str]:
    """Give what every program may read where the machine's own root stays visible."""
    return [*_SYSTEM, *("/etc/" + name for name in _ETC)]


def enter(at: str, read: List[str]) -> None:
    """Build the root on a directory and make it this process's own. Needs a mount namespace of its own.

    Args:
        at: An empty directory; the root is mounted over it.
        read: Directories that must be readable, at their own paths.
    """
    kernel.mount("none", "/", "", MS_REC | MS_PRIVATE)
    kernel.mount("collimate", at, "tmpfs", MS_NOSUID | MS_NODEV, "mode=755,size=4m")
    for path in _shown(read):
        _show(path, at)
    _fill_etc(at + "/etc")
    _fill_dev(at + "/dev")
    for name in ("tmp", "proc", "box", "var"):
        os.makedirs(os.path.join(at, name), exist_ok=True)
    os.chmod(at + "/tmp", 0o1777)
    os.symlink("/tmp", at + "/var/tmp")
    # with all that is mounted on it: whoever covers part of it would not get a fresh one in a user namespace
    kernel.mount("/proc", at + "/proc", "", MS_BIND | MS_REC)
    kernel.pivot_root(at)


def seal() -> None:
    """Make the root read-only for good."""
    kernel.mount("", "/", "", MS_BIND | MS_REMOUNT | _READ_ONLY | MS_NODEV)


def _shown(read: List[str]) -> List[str]:
    """Give the directories to show, parents first, none below another."""
    shown: List[str] = []
    for path in sorted([*_SYSTEM, *read], key=len):
        if os.path.lexists(path) and not any(path.startswith(top + "/") or path == top for top in shown):
            shown.append(path)
    return shown


def _show(path: str, at: str) -> None:
    target = at + path
    if os.path.islink(path):
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.symlink(os.readlink(path), target)
        return
    os.makedirs(target, mode=0o755, exist_ok=True)
    _bind_dir(path, target)


def _bind_dir(path: str, target: str) -> None:
    try:
        kernel.bind(path, target, _READ_ONLY | MS_NODEV)
    except OSError as error:
        if error.errno != errno.EINVAL:  # EINVAL: what is mounted below must come along in a user namespace
            raise
        kernel.mount(path, target, "", MS_BIND | MS_REC)
        kernel.set_read_only(target)


def _fill_etc(etc: str) -> None:
    os.makedirs(etc, exist_ok=True)
    for name in _ETC:
        source, target = "/etc/" + name, os.path.join(etc, name)
        if os.path.isdir(source):
            os.makedirs(target, exist_ok=True)
            _bind_dir(source, target)
        elif os.path.isfile(source):
            with open(source, "rb") as text, open(target, "wb") as copy:
                copy.write(text.read())
    for name, content in _WRITTEN.items():
        with open(os.path.join(etc, name), "w") as target_file:
            target_file.write(content)


def _fill_dev(dev: str) -> None:
    os.makedirs(dev, exist_ok=True)
    for name in _DEVICES:
        target = os.path.join(dev, name)
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o666))
        kernel.bind("/dev/" + name, target, MS_NOSUID | MS_NOEXEC)
    for name, target in _DEVICE_LINKS.items():
        os.symlink(target, os.path.join(dev, name))


class Box:
    """What each session mounts as its own: its work directory and /tmp, bounded together, and its /proc.

    Made by the zygote, before any session.

    Args:
        disk_mib: Bytes of all its files together, MiB.
        inodes: Number of all its files together.
        read: What ``enter`` got: what lies below /tmp is covered by the session's own, so it is bound again.
    """

    def __init__(self, disk_mib: int, inodes: int, read: List[str]) -> None:
        options = "mode=755,size=%dm,nr_inodes=%d" % (disk_mib, inodes)
        self._files = kernel.Mount("box", BOX, "tmpfs", MS_NOSUID | MS_NODEV, options)
        self._tmp = kernel.Mount(_TMP, "/tmp", "", MS_BIND)
        flags = MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC
        self._proc = kernel.Mount("proc", "/proc", "proc", flags)
        self._no_proc = kernel.Mount("none", "/proc", "tmpfs", flags, "mode=555,size=4k")
        self._covered = [path for path in read if path.startswith("/tmp/")]

    def mount(self, uid: int) -> bool:
        """Mount it all, in a session's own namespace.

        Args:
            uid: Owner of the work directory, and its group.

        Returns:
            Whether there is a /proc: a container that masks parts of it allows no fresh one without root.
        """
        handles = [(path, os.open(path, os.O_PATH | os.O_DIRECTORY)) for path in self._covered]
        self._files.make()
        os.mkdir(WORK, 0o700)
        os.chown(WORK, uid, uid)
        os.mkdir(_TMP)
        os.chmod(_TMP, 0o1777)
        self._tmp.make()
        for path, handle in handles:
            os.makedirs(path, mode=0o755, exist_ok=True)
            # read-only as the mount that it shows again
            kernel.mount("/proc/self/fd/%d" % handle, path, "", MS_BIND)
            os.close(handle)
        return self._mount_proc()

    def _mount_proc(self) -> bool:
        try:
            self._proc.make()
        except OSError:
            self._no_proc.make()  # what is visible there is the machine's own: an empty one hides it
            return False
        return True
