"""Runs many execs at full load, a tenth of them hostile, and counts what is left of them.

The daemon is counted at rest, loaded, and counted at rest again: no process, mount, cgroup, file or descriptor may be
there that was not there before. The first count comes after a short load of the same kind and after more sessions at a
time than the load ever holds: what the daemon makes at first use and keeps (cgroups, their open files, the arenas of
its allocator) is there by then. Every answer is checked too: honest execs print what they must, hostile ones end as
they may. Needs root: the descriptors and memory of the daemon's processes are nobody else's to see. Must not be run
beside another daemon that is started or ended meanwhile: mounts are counted for the whole machine::

    python benchmarks/endurance.py --execs 100000       # exit 1 if anything grew or an answer was wrong
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from collimate_ray.daemon.processes import mark_of, real_uid, tree_of
from collimate_ray.errors import CollimateRayError
from collimate_ray.sandbox import SandboxClient

#: Execs that one thread takes at a time: one batch, or one session's, or one after the other.
CHUNK = 20
#: The longest that the daemon may take to come to rest, s; for hangs only.
REST_S = 120.0
#: Memory that may stay, for each slot, MiB: allocators keep what the highest load took, and how high that was differs.
MEMORY_MIB = 2
#: Uids of sessions start here (``daemon/home.py``).
FIRST_UID = 200_000
_PUBLIC = ("/tmp", "/var/tmp", "/dev/shm")

_LIMITS = {"memory_mib": 64, "processes": 16, "output_mib": 1, "file_mib": 16}
#: Hostile programs: what they do, and the statuses that may come of it.
HOSTILE: dict[str, tuple[str, set[str]]] = {
    "fork bomb": ("import os\nwhile True: os.fork()", {"exit", "signal", "memory"}),
    "memory hog": ("x = bytearray(1 << 30)", {"memory"}),
    "shared memory": (
        "import mmap, os\nm = mmap.mmap(-1, 48 << 20)\nfor _ in range(8):\n    os.fork() or m.write(b'x' * (48 << 20))",
        {"ok", "exit", "memory", "signal"},
    ),
    "flood": ("import os\nwhile True: os.write(1, b'x' * 65536)", {"output"}),
    "kills itself": ("import os; os.kill(os.getpid(), 9)", {"signal"}),
    "kills all": (
        "import os\n"
        "for pid in [*range(1, 4000), -1]:\n"
        "    try: pid == os.getpid() or os.kill(pid, 9)\n"
        "    except OSError: pass",
        {"ok", "signal"},
    ),
    "fills the disk": (
        "n = 0\nwhile True:\n    open('/tmp/fill%d' % n, 'wb').write(b'x' * (4 << 20)); n += 1",
        {"exit", "memory", "signal", "timeout"},
    ),
    "daemonises": (
        "import os, time\nif not os.fork():\n    os.setsid()\n    os.fork() or time.sleep(1000)\n    os._exit(0)",
        {"ok"},
    ),
    "digs deep": ("import os\nfor _ in range(1000): os.mkdir('d' * 200); os.chdir('d' * 200)", {"ok", "exit"}),
    "closes its output": (
        "import os\nfor fd in range(256):\n    try: os.close(fd)\n    except OSError: pass",
        {"ok", "exit"},
    ),
    "leaves descriptors": (
        "import os, socket\nkept = []\nwhile True: kept.append(socket.socketpair())",
        {"exit"},
    ),
    "makes many files": ("for n in range(2000): open('f%d' % n, 'w').close()", {"ok", "exit", "memory"}),
}
SPIN = "while True: pass"
#: Of so many hostile ones one spins to its time-out of a second.
_SPIN_EVERY = 50

Counts = dict[str, int]


@dataclass
class Tally:
    """What came of the execs.

    Attributes:
        ended: How many by kind and status.
        wrong: A line for each answer that may not be.
    """

    ended: Counter[tuple[str, str]] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def add(self, index: int, answer: Mapping[str, Any] | CollimateRayError) -> None:
        """Judge one answer."""
        kind, _, expected, statuses = program(index)
        if isinstance(answer, CollimateRayError):
            self.wrong.append(f"exec {index} ({kind}): {answer!r}")
            return
        self.ended[kind, answer["status"]] += 1
        if answer["status"] not in statuses or (expected is not None and answer["stdout"] != expected):
            said = answer["stdout"][-200:]
            self.wrong.append(f"exec {index} ({kind}): found {answer['status']}, {said!r}; expected {statuses}")


def program(index: int) -> tuple[str, dict[str, Any], str | None, set[str]]:
    """Give an exec: its kind, the arguments of it, the output that it must have or None, and its possible statuses."""
    if index % 10:
        text = f"print({index} ** 2)"
        how = {"command": f"echo {index**2}"} if index % 7 == 0 else {"code": text}
        return "honest", {**how, "limits": _LIMITS}, f"{index**2}\n", {"ok"}
    number = index // 10
    if number % _SPIN_EVERY == 0:
        return "spins", {"code": SPIN, "limits": _LIMITS, "timeout_seconds": 1}, None, {"timeout"}
    kind = list(HOSTILE)[number % len(HOSTILE)]
    text, statuses = HOSTILE[kind]
    return kind, {"code": text, "limits": _LIMITS, "timeout_seconds": 60}, None, statuses


def run_chunk(client: SandboxClient, chunk: int, tally: Tally) -> None:
    """Run the execs of one chunk: of five, two go as batches, two singly and one in a session."""
    indices = range(chunk * CHUNK, (chunk + 1) * CHUNK)
    if chunk % 5 < 2:
        for position, answer in client.exec_batch("python", [program(index)[1] for index in indices]):
            tally.add(indices[position], answer)
    elif chunk % 5 < 4:
        for index in indices:
            tally.add(index, caught(lambda index=index: client.exec_once("python", **program(index)[1])))  # type: ignore[misc]
    else:
        name = client.create_session("python")["session_id"]
        for index in indices:
            tally.add(index, caught(lambda index=index: client.session_exec(name, **program(index)[1])))  # type: ignore[misc]
        client.delete_session(name)


def caught(work: Callable[[], dict[str, Any]]) -> dict[str, Any] | CollimateRayError:
    """Give an answer or the error that came instead."""
    try:
        return work()
    except CollimateRayError as error:
        return error


def load(socket: str, execs: int, threads: int) -> Tally:
    """Run so many execs, all threads busy to the end."""
    tally, chunks = Tally(), queue.SimpleQueue[int]()
    for chunk in range(execs // CHUNK):
        chunks.put(chunk)

    def work() -> None:
        with SandboxClient(unix_socket=socket) as client, contextlib.suppress(queue.Empty):
            while True:
                chunk = chunks.get_nowait()
                try:
                    run_chunk(client, chunk, tally)
                except CollimateRayError as error:
                    tally.wrong.append(f"chunk {chunk}: {error!r}")

    workers = [threading.Thread(target=work) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return tally


def widen(socket: str, sessions: int) -> None:
    """Hold more sessions at a time than the load ever does."""
    with SandboxClient(unix_socket=socket) as client:
        names = [client.create_session("python")["session_id"] for _ in range(sessions)]
        for name in names:
            client.delete_session(name)


class Census:
    """Counts what belongs to a daemon.

    Args:
        pid: The daemon's.
        home: A directory that holds its socket and all its files.
    """

    def __init__(self, pid: int, home: str) -> None:
        self.pid, self.home = pid, home
        self.zygotes = _children(pid)
        self.mark = mark_of(self.zygotes[0])

    def counts(self) -> Counts:
        """Count: what must not grow at all."""
        ours = self._processes()
        return {
            "processes": len(ours),
            "mount namespaces": len({link for pid in ours if (link := _namespace(pid))}),
            "mounts of the machine": len(Path("/proc/mounts").read_text().splitlines()),
            "cgroups": _cgroups(f"collimate-{self.mark}"),
            "files of the daemon": sum(len(dirs) + len(files) for _, dirs, files in os.walk(self.home)),
            "files of sessions elsewhere": sum(map(_of_sessions, _PUBLIC)),
            "descriptors of the daemon": len(os.listdir(f"/proc/{self.pid}/fd")),
            "descriptors of zygotes": sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in _children(self.pid)),
            "zygotes that were replaced": len(set(_children(self.pid)) - set(self.zygotes)),
        }

    def memory(self) -> Counts:
        """Measure memory, KiB: what may grow by a little."""
        zygotes = _children(self.pid)
        return {
            "RSS of the daemon, KiB": _kib(self.pid, "Rss:"),
            "PSS of the daemon, KiB": _kib(self.pid, "Pss:"),
            "RSS of zygotes, KiB": sum(_kib(pid, "Rss:") for pid in zygotes),
            "PSS of zygotes, KiB": sum(_kib(pid, "Pss:") for pid in zygotes),
        }

    def _processes(self) -> set[int]:
        """Find all below the daemon, and what carries its mark although it is not."""
        below = set(tree_of(self.pid))
        return below | {pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if mark_of(pid) == self.mark}


def _children(pid: int) -> list[int]:
    return [each for each in tree_of(pid) if each != pid and _parent(each) == pid]


def _parent(pid: int) -> int:
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0


def _namespace(pid: int) -> str:
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/{pid}/ns/mnt")
    return ""


def _kib(pid: int, field: str) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))


def _cgroups(name: str) -> int:
    tops = [top for top, _, _ in os.walk("/sys/fs/cgroup") if os.path.basename(top) == name]
    return sum(1 + len(dirs) for top in tops for _, dirs, _ in os.walk(top))


def _of_sessions(folder: str) -> int:
    with contextlib.suppress(OSError):
        return sum(entry.stat(follow_symlinks=False).st_uid >= FIRST_UID for entry in os.scandir(folder))
    return 0


def is_at_rest(health: Mapping[str, Any]) -> bool:
    """Tell whether nothing runs and the pools are full."""
    zygotes = min(len(os.sched_getaffinity(0)), health["slots"])
    templates = health["template_details"].values()
    is_full = all(each["zygotes"] == zygotes and each["parked"] == each["to_park"] for each in templates)
    return is_full and not health["running"] and not health["queued"] and not health["sessions"]


def settle(socket: str, census: Census, before: Counts | None) -> Counts:
    """Count when the daemon is at rest and the counts stand still; given a first count, wait for what is on its way."""
    end, last = time.monotonic() + REST_S, None
    with SandboxClient(unix_socket=socket) as client:
        while time.monotonic() < end:
            counts = census.counts() if is_at_rest(client.health()) else None
            if counts is not None and counts == last and (before is None or not grown(before, counts)):
                return counts
            last = counts
            time.sleep(0.2)
    if last is None:
        raise SystemExit(f"the daemon did not come to rest within {REST_S:g} s")
    return last


def grown(before: Counts, after: Counts, tolerance: int = 0) -> list[str]:
    """Name what there is more of."""
    return [name for name, count in after.items() if count > before[name] + tolerance]


@contextlib.contextmanager
def served(folder: str, slots: int) -> Iterator[tuple[str, int]]:
    """Serve; give socket and pid."""
    path = os.path.join(folder, "d", "serve.sock")
    command = [sys.executable, "-m", "collimate_ray", "serve", "--socket", path, "--slots", str(slots), "--json"]
    environment = {**os.environ, "TMPDIR": folder}
    with (
        open(os.path.join(folder, "log"), "wb") as log,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, env=environment) as process,
    ):
        try:
            assert process.stdout is not None
            ready = json.loads(process.stdout.readline() or "{}")
            if not ready:
                raise SystemExit(Path(folder, "log").read_text())
            yield ready["socket"], process.pid
        finally:
            process.terminate()


def endure(execs: int, slots: int, say: Callable[[str], None] = print) -> list[str]:
    """Do all of it.

    Args:
        execs: How many, a multiple of ``CHUNK``.
        slots: Of the daemon.
        say: Takes the lines of the table.

    Returns:
        A line for all that grew and for each wrong answer; [] is well.
    """
    with tempfile.TemporaryDirectory() as folder, served(folder, slots) as (socket, pid):
        census = Census(pid, folder)
        warm_up = load(socket, 50 * CHUNK, slots)
        # a batch has up to as many in flight as there are slots, and dead sessions hold their numbers for a moment
        widen(socket, 6 * slots)
        before = settle(socket, census, None)
        memory_before = census.memory()
        began = time.monotonic()
        tally = load(socket, execs, slots)
        spent = time.monotonic() - began
        after = settle(socket, census, before)
        memory_after = census.memory()
    for line in table(before | memory_before, after | memory_after):
        say(line)
    for (kind, status), count in sorted(tally.ended.items()):
        say(f"{kind:20}{status:10}{count:8}")
    done = sum(tally.ended.values())
    say(f"{done} of {execs} execs in {spent:.1f} s: {done / spent:.0f}/s with {slots} slots")
    more = grown(before, after) + grown(memory_before, memory_after, MEMORY_MIB * slots << 10)
    missing = [] if done == execs else [f"{execs - done} execs have no end"]
    return [*(f"grew: {name}" for name in more), *missing, *warm_up.wrong, *tally.wrong]


def table(before: Counts, after: Counts) -> Iterator[str]:
    """Give the lines of the table."""
    yield f"{'':30}{'before':>10}{'after':>10}{'more':>8}"
    for name, count in before.items():
        yield f"{name:30}{count:10}{after[name]:10}{after[name] - count:8}"


def main() -> int:
    """Run, print the table, tell by the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--execs", type=int, default=100_000, help=f"a multiple of {CHUNK} (default 100000)")
    parser.add_argument("--slots", type=int, default=8, help="of the daemon, all in use (default 8)")
    options = parser.parse_args()
    if real_uid(os.getpid()) != 0:
        parser.error("expected to be run by root")
    if options.execs < CHUNK or options.execs % CHUNK:
        parser.error(f"--execs: expected a multiple of {CHUNK}, found {options.execs}")
    wrong = endure(options.execs, options.slots, lambda line: print(line, flush=True))
    for line in wrong[:50]:
        print(line, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.path[:1] = [str(Path(__file__).resolve().parent)]
    sys.exit(main())
