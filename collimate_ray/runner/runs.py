"""Runs of a candidate's process, as the keeper sees them: start, watch, kill, reap; and a conversation with one."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
import time
from typing import Any

from collimate_ray.runner.channel import Channel, ConversationError, Garbled, Gone, Stopwatch, TimeUp, wait_ready
from collimate_ray.runner.launcher import receive_order, send_order
from collimate_ray.runner.peer import ARGUMENT_OPS, Peer, described, rebuilt

#: Seconds that a process gets to end by itself once its pipes are closed.
_END_S = 0.5


class LauncherLost(Exception):
    """The launcher died or cannot fork: the session is broken, and nothing is reported."""


class Runs:
    """Starts candidates through the launcher, one at a time, each in a directory of its own.

    Args:
        launcher: The socket to the launcher.
        request: The request: limits, seed.
        uid: The user that candidates become, or None.
        top: The directory for theirs.
    """

    def __init__(self, launcher: socket.socket, request: dict[str, Any], uid: int | None, top: str) -> None:
        self.limits: dict[str, Any] = request["limits"]
        self.evidence: dict[str, int] = {}
        self.rss_kib = 0
        self._launcher = launcher
        self._seed: str = request["seed"]
        self._uid = uid
        self._top = top
        total = self.limits.get("total_time_s")
        self._deadline = None if total is None else time.monotonic() + total

    def count(self, kind: str, times: int = 1) -> None:
        """Count a piece of evidence."""
        self.evidence[kind] = self.evidence.get(kind, 0) + times

    def clock(self, pid: int) -> Stopwatch:
        """Make the clock of one case."""
        wall = float(self.limits["wall_time_s"])
        if self._deadline is not None:
            wall = min(wall, max(0.0, self._deadline - time.monotonic()))
        return Stopwatch(pid, float(self.limits["time_s"]), wall)

    def start(self, mode: str, fds: list[int], sources: dict[str, str] | None = None) -> "Run":
        """Start a candidate with these descriptors, which stay the caller's, and these files."""
        directory = tempfile.mkdtemp(dir=self._top)
        for name, source in (sources or {}).items():
            with open(os.path.join(directory, name), "w", encoding="utf-8", errors="surrogatepass", newline="") as out:
                out.write(source)
        if self._uid is not None:
            for path in [directory] + [os.path.join(directory, name) for name in os.listdir(directory)]:
                os.chown(path, self._uid, self._uid)
        order = {name: self.limits[name] for name in ("memory_mib", "processes", "files", "file_mib")}
        own_uid = "COLLIMATE_CANDIDATE_UID" in os.environ
        order.update(mode=mode, dir=directory, seed=self._seed, uid=self._uid, own_uid=own_uid)
        send_order(self._launcher, order, fds)
        answer = self._hear()
        if "pid" not in answer:
            raise LauncherLost("fork failed: %s" % answer.get("failed"))
        return Run(self, self._launcher, answer["pid"], directory)

    def reap(self) -> dict[str, Any]:
        """Let the launcher reap the candidate and sweep what it left; give status, CPU time and memory."""
        send_order(self._launcher, {"reap": True}, [])
        seen = self._hear()
        self.rss_kib = max(self.rss_kib, int(seen["rss_kib"]))
        return seen

    def hear_exit(self) -> None:
        """Take the launcher's word that the candidate ended."""
        self._hear()

    def close(self) -> None:
        """Send the launcher home."""
        self._launcher.shutdown(socket.SHUT_WR)

    def _hear(self) -> dict[str, Any]:
        try:
            answer, _ = receive_order(self._launcher)
        except OSError:
            answer = None
        if answer is None:
            raise LauncherLost("the launcher died")
        return answer  # type: ignore[no-any-return]


class Run:
    """One candidate's process, until ``finish``."""

    def __init__(self, runs: Runs, launcher: socket.socket, pid: int, directory: str) -> None:
        self.pid = pid
        self._runs = runs
        self._launcher = launcher
        self._directory = directory
        self._exited = False

    def wait_ready(self, fds: list[tuple[int, bool]], clock: Stopwatch) -> set[int]:
        """Wait for descriptors or the process's end; an empty set: it ended and nothing else is ready."""
        if self._exited:
            return wait_ready(fds, clock) if fds else set()
        watch = self._launcher.fileno()
        ready = wait_ready(fds + [(watch, False)], clock)
        if watch in ready:
            self._runs.hear_exit()
            self._exited = True
        return ready - {watch}

    def exits_soon(self) -> bool:
        """Wait a moment for the process to end by itself: its pipes close before its end can be told."""
        if not self._exited:
            try:
                self.wait_ready([], Stopwatch.running(self.pid, _END_S))
            except TimeUp:
                return False
        return self._exited

    @property
    def exited(self) -> bool:
        """Whether the process is known to have ended."""
        return self._exited

    def finish(self) -> dict[str, Any]:
        """Kill what still runs, reap it, sweep what it left, remove its directory."""
        if not self._exited:
            os.kill(self.pid, 9)  # not reaped yet, so the pid is still this process's
            self._runs.hear_exit()
            self._exited = True
        seen = self._runs.reap()
        shutil.rmtree(self._directory, ignore_errors=True)
        return seen


class ClockedPeer(Peer):
    """The keeper's end: the candidate's clock runs while it is asked, and what broke stays broken.

    A test's bare ``except`` may swallow a break; the next question then meets it again, and so does the record.
    """

    def __init__(self, channel: Channel) -> None:
        super().__init__(channel, ARGUMENT_OPS)
        self.clock: Stopwatch | None = None
        self.broke: ConversationError | None = None
        self._depth = 0

    def exchange(self, op: str, target: Any, args: list[Any], kwargs: bool = False) -> dict[str, Any]:
        """Ask on the clock."""
        if self.broke is not None:
            raise self.broke
        if self._depth == 0 and self.clock is not None:
            self.clock.start()
        self._depth += 1
        try:
            return super().exchange(op, target, args, kwargs)
        except ConversationError as error:
            self.broke = error
            raise
        finally:
            self._depth -= 1
            if self._depth == 0 and self.clock is not None:
                self.clock.stop()


class Talk:
    """A conversation with a loaded candidate; a broken one stays broken.

    Args:
        runs: Where candidates come from.
    """

    def __init__(self, runs: Runs) -> None:
        self._runs = runs
        to_candidate, from_keeper = os.pipe()[::-1]
        from_candidate, to_keeper = os.pipe()
        null = os.open(os.devnull, os.O_RDWR)
        try:
            self._run = runs.start("calls", [null, null, null, from_keeper, to_keeper])
        finally:
            for fd in (null, from_keeper, to_keeper):
                os.close(fd)
        self.clock = runs.clock(self._run.pid)
        self.broken: dict[str, Any] | None = None
        self.peer = ClockedPeer(Channel(from_candidate, to_candidate, self._wait))

    def _wait(self, fd: int, writing: bool) -> None:
        if not self._run.wait_ready([(fd, writing)], self.clock):
            if self._run.exited:  # a grandchild may hold the pipe open
                self._run.wait_ready([], self.clock)
            raise Gone

    def load(self, request: dict[str, Any]) -> dict[str, Any]:
        """Run prelude and candidate; give the record of it."""
        self.renew()
        record = self.ask("prepare", [request["prelude"]])
        if record["s"] != "ok":  # no candidate's code has run yet
            return {"s": "prelude", "exc": record.get("exc", ["", record["s"], ""])}
        self.renew()
        record = self.ask("load", [request["code"], request["entry"]])
        if record["s"] == "ok" and record.get("v") is not True:
            return {"s": "no_entry"}
        return record

    def renew(self) -> None:
        """Start the clock of the next case."""
        self.clock = self.peer.clock = self._runs.clock(self._run.pid)

    def ask(self, op: str, args: list[Any], on: Any = None) -> dict[str, Any]:
        """Ask once on the clock and give the record: ``s`` is ok (with ``v``), exc, memory, or how it broke."""
        try:
            answer = self.peer.exchange(op, on, args)
        except ConversationError:
            return self.timed(self.breakage())
        if "x" in answer:
            try:
                return self.timed(failure(rebuilt(answer["x"])))
            except Garbled as error:
                self.peer.broke = error
                return self.timed(self.breakage())
        return self.timed({"s": "ok", "v": answer.get("a")})

    def timed(self, record: dict[str, Any]) -> dict[str, Any]:
        """Add the case's times to its record."""
        record.update(cpu_ms=round(1000 * self.clock.cpu, 3), wall_ms=round(1000 * self.clock.wall, 3))
        return record

    def breakage(self) -> dict[str, Any]:
        """End the candidate and tell how the conversation broke."""
        error = self.peer.broke
        closed = isinstance(error, Gone) and not self._run.exits_soon()
        seen = self._end()
        if closed:
            self._runs.count("closed_channel")
            self.broken = {"s": "garbled"}
        elif isinstance(error, TimeUp):
            self.broken = {"s": "timeout"}
        elif isinstance(error, Garbled):
            self._runs.count("protocol_bytes")
            self.broken = {"s": "garbled"}
        else:
            self.broken = ended(seen["status"])
            if self.broken == {"s": "exit", "code": 0}:
                self._runs.count("early_exit")
        return dict(self.broken)

    def close(self) -> None:
        """End the candidate."""
        if self.broken is None:
            self._end()
            self.broken = {"s": "closed"}

    def _end(self) -> dict[str, Any]:
        seen = self._run.finish()
        os.close(self.peer.channel.read_fd)
        os.close(self.peer.channel.write_fd)
        for kind, times in self.peer.evidence.items():
            self._runs.count(kind, times)
        return seen


def failure(error: BaseException) -> dict[str, Any]:
    """Record an exception that the candidate is to answer for."""
    return {"s": "memory"} if isinstance(error, MemoryError) else {"s": "exc", "exc": described(error)}


def ended(status: int) -> dict[str, Any]:
    """Record a process's end from its wait status."""
    if os.WIFSIGNALED(status):
        return {"s": "signal", "signal": os.WTERMSIG(status)}
    return {"s": "exit", "code": os.WEXITSTATUS(status)}
