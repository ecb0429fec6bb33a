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
    """Judges a process's own time: wall time less the time its tasks stood runnable, waiting for a core.

    So a loaded machine costs nobody a verdict and a sleeper is still caught (design: API, limits). The wall time is
    bounded too, as a guard. Source: ``/proc/<pid>/task/<tid>/schedstat``, second field, ns.

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
        self._began: tuple[float, dict[str, int], float] | None = None

    @classmethod
    def running(cls, pid: int, wall_s: float) -> "Stopwatch":
        """Make one that runs already and only guards the wall time."""
        clock = cls(pid, wall_s, wall_s)
        clock.start()
        return clock

    def start(self) -> None:
        """Begin or go on."""
        self._began = (time.monotonic(), _run_delays(self.pid), cpu_seconds(self.pid))

    def stop(self) -> None:
        """Pause."""
        if self._began is not None:
            began, delays, cpu = self._began
            self.wall += time.monotonic() - began
            self._waited += _waited_since(delays, _run_delays(self.pid))
            self.cpu += max(0.0, cpu_seconds(self.pid) - cpu)
            self._began = None

    def left(self) -> float:
        """Seconds after which to look again; 0 or less: the time is up."""
        began, delays, _ = self._began or (time.monotonic(), {}, 0.0)
        wall = self.wall + time.monotonic() - began
        if wall < self.time_s:  # cheap: no look at /proc until it could matter
            return min(self.time_s, self.wall_s) - wall
        own = wall - self._waited - _waited_since(delays, _run_delays(self.pid))
        return min(self.time_s - own, self.wall_s - wall)


def _run_delays(pid: int) -> dict[str, int]:
    found = {}
    try:
        for task in os.listdir("/proc/%d/task" % pid):
            with open("/proc/%d/task/%s/schedstat" % (pid, task)) as text:
                found[task] = int(text.read().split()[1])
    except (OSError, IndexError, ValueError):
        return found  # the process ended, or the kernel does not tell
    return found


def _waited_since(before: dict[str, int], after: dict[str, int]) -> float:
    """Longest wait of any task, s: the tasks of one process wait side by side."""
    return max((ns - before.get(task, 0) for task, ns in after.items()), default=0) / 1e9


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
        left = clock.left() if clock is not None else None
        if left is not None and left <= 0:
            raise TimeUp
        ready = poll.poll(None if left is None else max(1, int(left * 1000)))
        if ready:
            return {fd for fd, _ in ready}
