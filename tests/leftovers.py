"""What a test leaves behind: processes, descriptors, sockets, files and threads of this test run.

The whole run lives in a temporary directory of its own (conftest.py sets TMPDIR), so a process is ours if it descends
from us or if its arguments or environment name that directory, whoever its parent is now. Other runs on the same
machine are never seen.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

#: Longest wait for what is on its way out, s: a killed process is reaped, a closed socket goes.
PATIENCE_S = 5.0


@dataclass(frozen=True)
class Snapshot:
    """What there is now. Keys identify, values describe."""

    processes: dict[tuple[int, str], str]
    descriptors: dict[tuple[int, str], str]
    sockets: dict[str, str]
    files: dict[str, str]
    threads: dict[int, str]


class Watch:
    """Compares with a baseline.

    Args:
        root: Temporary directory of this test run.
        runtime: Directory of our sockets and work, all of which is watched.
    """

    def __init__(self, root: Path, runtime: Path) -> None:
        self.root = root
        self.runtime = runtime
        self.rebase()

    def rebase(self) -> None:
        """Take what is there now as given, for a test that knowingly changes a long-lived fixture."""
        self.baseline = self.snapshot()

    def snapshot(self) -> Snapshot:
        return Snapshot(
            processes(str(self.root).encode()),
            {} if ray_is_on() else descriptors(),
            unix_sockets(f"{self.root}/", f"{self.root}/r/"),
            files(self.root, self.runtime),
            {t.ident or 0: t.name for t in threading.enumerate() if t.name.startswith("collimate")},
        )

    def left(self, patience_s: float = PATIENCE_S) -> list[str]:
        """Name what is left, one line each, after waiting for what is on its way out."""
        end = time.monotonic() + patience_s
        while (lines := self._new(self.snapshot())) and time.monotonic() < end:
            gc.collect()  # only now: it costs more than the look
            time.sleep(0.05)
        return lines

    def _new(self, now: Snapshot) -> list[str]:
        lines = []
        for kind, found in vars(now).items():
            known = getattr(self.baseline, kind)
            lines += [f"{kind}: {text}" for key, text in found.items() if key not in known]
        return lines


def ray_is_on() -> bool:
    """True while a Ray driver lives in this process: its descriptors come and go as it likes."""
    ray = sys.modules.get("ray")
    return ray is not None and hasattr(ray, "is_initialized") and ray.is_initialized()


def processes(mark: bytes) -> dict[tuple[int, str], str]:
    """Find this run's processes, by (pid, start time); those that Ray itself keeps do not count."""
    table = {int(name): known for name in os.listdir("/proc") if name.isdigit() and (known := _process(int(name)))}
    found = {}
    for pid, (parent, start, arguments) in table.items():
        ours = _descends(table, parent) or mark in arguments or mark in _read(f"/proc/{pid}/environ")
        if ours and pid != os.getpid() and not _is_rays(arguments) and not _is_daemons(table, pid):
            shown = arguments.replace(b"\0", b" ").decode(errors="replace")[:200]
            found[pid, start] = f"pid {pid}, parent {parent}: {shown}"
    return found


def _process(pid: int) -> tuple[int, str, bytes] | None:
    """Parent, start time and arguments; None if it has ended (a zombie is its parent's affair)."""
    fields = _read(f"/proc/{pid}/stat").rpartition(b")")[2].split()
    if len(fields) < 20 or (fields[0] in (b"X", b"Z") and int(fields[1]) != os.getpid()):
        return None
    return int(fields[1]), fields[19].decode(), _read(f"/proc/{pid}/cmdline")


def _descends(table: dict[int, tuple[int, str, bytes]], pid: int) -> bool:
    while pid in table:
        if pid == os.getpid():
            return True
        pid = table[pid][0]
    return False


#: A raylet starts and ends its workers and agents when it likes; actors of ours are found by their daemons.
_RAYS_OWN = (b"ray::", b"/ray/_private/", b"/ray/core/src/", b"/ray/dashboard/", b"/ray/util/client/")


def _is_rays(arguments: bytes) -> bool:
    return any(word in arguments for word in _RAYS_OWN)


#: In the arguments of zygotes and of the sessions that they fork.
_ZYGOTE = b"_collimate.zygote"


def _is_daemons(table: dict[int, tuple[int, str, bytes]], pid: int) -> bool:
    """Tell whether it is a zygote or a forked session of a daemon that lives: those come and go as it likes."""
    while pid in table and _ZYGOTE in table[pid][2]:
        pid = table[pid][0]
        if pid in table and (b"serve" in table[pid][2] or b"DaemonConfig" in table[pid][2]):
            return True
    return False


def _read(path: str) -> bytes:
    with contextlib.suppress(OSError):
        return Path(path).read_bytes()
    return b""


def descriptors() -> dict[tuple[int, str], str]:
    """Give this process's descriptors, by (number, target)."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the one that listed them is closed by now
            target = os.readlink(f"/proc/self/fd/{name}")
            found[int(name), target] = f"fd {name}: {target}"
    return found


def unix_sockets(inside: str, but: str) -> dict[str, str]:
    """Give the bound unix sockets below one directory and not below another."""
    paths = [line.split(maxsplit=7)[7] for line in Path("/proc/net/unix").read_text().splitlines() if line.count(" /")]
    return {path: path for path in paths if path.startswith(inside) and not path.startswith(but)}


def files(root: Path, runtime: Path) -> dict[str, str]:
    """Give all that is in the runtime directory, and what else of ours is in the temporary directory."""
    found = {}
    for folder, folders, names in os.walk(runtime):
        found.update({os.path.join(folder, name): os.path.join(folder, name) for name in folders + names})
    with contextlib.suppress(OSError):
        for path in root.glob("collimate*"):
            if path != runtime:
                found[str(path)] = str(path)
    return found
