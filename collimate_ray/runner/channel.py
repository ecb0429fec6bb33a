"""Messages over descriptors inside a session: a length, then JSON. One end may be hostile.

A reader that fears its peer gives a clock; whatever arrives that is not a message is ``Garbled``, the peer's own fault.
"""

from __future__ import annotations

import os
import select
import struct
import time
from typing import Any, Callable

from collimate_ray.values import MAX_VALUE_BYTES, ValueCrossingError, dumps, loads

#: Seconds between looks at a candidate's clock; one that answers sooner costs no look.
_LOOK_S = 0.05

#: Seconds that what stands in a pipe may take to be read after the time was up.
_DRAIN_S = 0.5

#: An exchange shorter than this is not looked at, s: whoever waits takes longer.
_SHORT_S = 0.002

_CORES = len(os.sched_getaffinity(0))

#: Tasks of a candidate that are looked at; more are only a fork bomb's.
_MOST_TASKS = 256

#: Bytes of a message's length.
_HEADER = 4

#: Longest message: a value and its wrapping.
_MAX_MESSAGE = MAX_VALUE_BYTES + (1 << 20)


class ConversationError(BaseException):
    """The conversation itself broke. Not an ``Exception``: a test's ``except Exception`` must not swallow it."""


class Garbled(ConversationError):
    """Bytes that are no message."""


class Gone(ConversationError):
    """The other end closed."""


class TimeUp(ConversationError):
    """The clock ran out."""


class Channel:
    """One end of a two-way channel.

    Args:
        read_fd: Where messages come from.
        write_fd: Where they go.
        wait: Called with (fd, writing) before each read or write; returns when it may go on, else raises. None: block.
    """

    def __init__(self, read_fd: int, write_fd: int, wait: Callable[[int, bool], None] | None = None) -> None:
        self.read_fd = read_fd
        self.write_fd = write_fd
        self._wait = wait
        if wait is not None:
            os.set_blocking(read_fd, False)
            os.set_blocking(write_fd, False)

    def send(self, message: Any) -> None:
        """Write one message whole."""
        body = dumps(message).encode("ascii")
        left = memoryview(struct.pack(">I", len(body)) + body)
        while left:
            if self._wait is not None:
                self._wait(self.write_fd, True)
            try:
                left = left[os.write(self.write_fd, left) :]
            except BlockingIOError:
                continue
            except OSError:
                raise Gone from None

    def recv(self) -> Any:
        """Read one message whole."""
        (size,) = struct.unpack(">I", self._read(_HEADER))
        if size > _MAX_MESSAGE:
            raise Garbled("a message of %d bytes" % size)
        body = self._read(size)
        try:
            return loads(body.decode("ascii"))
        except (UnicodeDecodeError, ValueCrossingError):
            raise Garbled("not JSON") from None

    def _read(self, size: int) -> bytes:
        got = bytearray()
        while len(got) < size:
            if self._wait is not None:
                self._wait(self.read_fd, False)
            try:
                chunk = os.read(self.read_fd, min(size - len(got), 1 << 20))
            except BlockingIOError:
                continue
            except OSError:
                raise Gone from None
            if not chunk:
                raise Gone
            got += chunk
        return bytes(got)


class Stopwatch:
    """Judges a candidate's own time: wall time less the time when a task of its stood runnable, waiting for a core.

    So a loaded machine costs nobody a verdict and a sleeper is still caught (design: API, limits). Looked at in short
    intervals, the longest wait of any task of the tree counts in each: tasks wait side by side, and ones that end take
    their account with them. The wall time is bounded too, as a guard. Source: ``/proc/<pid>/task/<tid>/schedstat``.
    CPU time bounds it from below: what all tasks used, divided among the cores, is never less than their own time, so
    that tasks made only to wait gain nothing. Where there is no ``/proc``, or the kernel does not tell who waited, the
    process's CPU time stands for its own, at most the wall time: sleep and children then end at the wall's guard only.

    Args:
        pid: The process.
        time_s: Own time allowed, s.
        wall_s: Wall time allowed, s.
    """

    def __init__(self, pid: int, time_s: float, wall_s: float) -> None:
        self.pid = pid
        self.time_s = time_s
        self.wall_s = wall_s
        self.wall = 0.0
        self.cpu = 0.0
        self._waited = 0.0
        self._began: tuple[float, float] | None = None
        self._used = 0.0
        #: task -> ns on a core and ns waited when it was last looked at, and when that was
        self._seen: dict[str, tuple[int, int]] = {}
        self._looked = 0.0
        self._up_at = 0.0
        self._told = os.path.exists("/proc/self/schedstat")

    @classmethod
    def running(cls, pid: int, wall_s: float) -> "Stopwatch":
        """Make one that runs already and only guards the wall time."""
        clock = cls(pid, wall_s, wall_s)
        clock.start()
        return clock

    def start(self) -> None:
        """Begin or go on."""
        self._looked = time.monotonic()
        self._began = (self._looked, cpu_seconds(self.pid))
        if not self._seen:  # later starts go on from the last look: a candidate that is not asked waits for nothing
            self._seen = _schedule(self.pid)

    def stop(self) -> None:
        """Pause."""
        if self._began is not None:
            began, cpu = self._began
            if time.monotonic() - self._looked > _SHORT_S:
                self.look()
            self.wall += time.monotonic() - began
            self.cpu += max(0.0, cpu_seconds(self.pid) - cpu)
            self._began = None

    def look(self) -> None:
        """Account for the interval since the last look."""
        now, tasks = time.monotonic(), _schedule(self.pid)
        # a task that was not there before counts from its start, which is within the interval
        before = [self._seen.get(task, (0, 0)) for task in tasks]
        waited = max((after[1] - old[1] for after, old in zip(tasks.values(), before)), default=0) / 1e9
        self._used += sum(after[0] - old[0] for after, old in zip(tasks.values(), before)) / 1e9
        self._waited += min(waited, now - self._looked)
        self._seen, self._looked = tasks, now

    def check(self, ready: bool) -> None:
        """Look at the time where a look is due. What is ready may still be taken for a moment: it came in time.

        Raises:
            TimeUp: The time is up.
        """
        now = time.monotonic()
        if not ready or now - self._looked >= _LOOK_S:
            self.look()
        if self.left() > 0:
            return
        self._up_at = self._up_at or now
        if not ready or now - self._up_at > _DRAIN_S:
            raise TimeUp

    def left(self) -> float:
        """Seconds of own or wall time that are left; 0 or less: the time is up."""
        now, cpu = time.monotonic(), self.cpu
        began = self._began[0] if self._began else now
        wall = self.wall + now - began
        if self._began and not self._told:
            cpu += max(0.0, cpu_seconds(self.pid) - self._began[1])
        own = max(wall - self._waited, self._used / _CORES) if self._told else min(wall, cpu)
        return min(self.time_s - own, self.wall_s - wall)


def _schedule(root: int) -> dict[str, tuple[int, int]]:
    """Give the time that each task of a process and its descendants was on a core and waited for one, ns by task id."""
    found: dict[str, tuple[int, int]] = {}
    pids = [str(root)]
    while pids and len(found) < _MOST_TASKS:
        pid = pids.pop()
        try:
            for task in os.listdir("/proc/%s/task" % pid):
                with open("/proc/%s/task/%s/schedstat" % (pid, task)) as text:
                    on_core, waited = text.read().split()[:2]
                    found[task] = (int(on_core), int(waited))
                with open("/proc/%s/task/%s/children" % (pid, task)) as text:
                    pids += text.read().split()
        except (OSError, IndexError, ValueError):
            continue  # it ended, or the kernel does not tell
    return found


def cpu_seconds(pid: int) -> float:
    """CPU time of all threads of a process so far, s (its CPU clock, see clock_getcpuclockid(3))."""
    try:
        return time.clock_gettime((~pid << 3) | 2)
    except OSError:
        return 0.0


def wait_ready(fds: list[tuple[int, bool]], clock: Stopwatch | None) -> set[int]:
    """Wait until a descriptor is ready.

    Args:
        fds: (descriptor, True to write or False to read).
        clock: Whose time runs meanwhile, or None.

    Returns:
        The descriptors that are ready.

    Raises:
        TimeUp: The clock ran out first.
    """
    poll = select.poll()  # not select(): descriptors past 1024
    for fd, writing in fds:
        poll.register(fd, select.POLLOUT if writing else select.POLLIN)
    while True:
        left = _LOOK_S if clock is None else max(0.001, min(clock.left(), _LOOK_S))
        ready = poll.poll(int(left * 1000) + 1)
        if clock is not None:
            clock.check(bool(ready))
        if ready:
            return {fd for fd, _ in ready}
