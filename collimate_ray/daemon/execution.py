"""One exec from spawn to outcome: feed its input, read its output, stop it at a limit, end what it leaves behind.

Must not know of sessions, HTTP or admission. Source: design/WIRE.md (ExecResponse, time-out, 16 MiB, status).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import marshal
import os
import subprocess
import time

from collimate_ray.daemon.home import Home, Place
from collimate_ray.daemon.launch import boot_command, boot_request, environment
from collimate_ray.daemon.outcome import BringupFailed, ExecRequest, Outcome, natural_status, wire_exit_code
from collimate_ray.daemon.processes import Family, Rusage, kill_group, memory_kib

_log = logging.getLogger(__name__)

#: Bytes taken from the pipe at a time: what a pipe holds on Linux.
_CHUNK = 1 << 16
#: How often the memory of an exec's processes together is looked at, s. Each alone is bounded by its rlimit.
_MEMORY_LOOK_S = 0.2
#: What the interpreters and the runner's keeper may take beyond the limit, MiB.
_MEMORY_SLACK_MIB = 128


class Execution:
    """One running exec.

    Args:
        request: What to run.
        home: The daemon's directory.
        place: The session's directories.
        uid: The session's own uid, or None.
        mark: What the exec's processes are marked with.
        keep: Directories that must stay readable.
        family: The daemon's running execs.
    """

    def __init__(
        self,
        request: ExecRequest,
        home: Home,
        place: Place,
        uid: int | None,
        mark: str,
        keep: list[str],
        family: Family,
    ) -> None:
        self.request = request
        self._home, self._place, self._uid, self._keep = home, place, uid, keep
        self._mark, self._family = mark, family
        self._loop = asyncio.get_running_loop()
        self._exited: asyncio.Future[int] = self._loop.create_future()
        self._used = Rusage()
        self._output = bytearray()
        self._cap = request.output_bytes
        self._stopped = ""
        self._pid = 0
        self._descriptors: list[int] = []

    async def run(self) -> Outcome:
        """Run it to its end; nothing of it lives afterwards.

        Raises:
            BringupFailed: It never started.
        """
        started = time.monotonic()
        try:
            self._spawn()
        except OSError as error:
            self._close_all()
            raise BringupFailed(f"the exec's process can't be started: {error.strerror}") from error
        if self._stopped:  # cancelled before it began
            kill_group(self._pid)
        forked = time.monotonic()
        timer = self._loop.call_later(self.request.wall_s, self.stop, "timeout")
        watch = self._loop.create_task(self._watch_memory())
        try:
            status = await self._exited
        finally:
            timer.cancel()
            watch.cancel()
        ended = time.monotonic()
        await self._family.sweep(self._mark, self._uid, self._used)
        self._drain()
        began = self._fence_stood()
        self._close_all()
        if not began and not self._stopped:
            raise BringupFailed(f"the exec's fence can't be built: {self._tail()[:300]}")
        return self._outcome(status, (forked - started) * 1e3, (ended - forked) * 1e3)

    def stop(self, why: str) -> None:
        """Kill it; the first reason counts.

        Args:
            why: ``timeout``, ``output``, ``memory`` or ``cancelled``.
        """
        if self._exited.done():
            return
        self._stopped = self._stopped or why
        if self._pid:
            kill_group(self._pid)

    def on_exit(self) -> None:
        """Look whether the main process ended (SIGCHLD came): end its group, then reap it."""
        if not self._pid or self._exited.done():
            return
        if os.waitid(os.P_PID, self._pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return
        kill_group(self._pid)  # before reaping: afterwards the number may be another's
        _, status, usage = os.wait4(self._pid, 0)
        del self._family.mains[self._pid]
        self._used.add(usage.ru_utime + usage.ru_stime, usage.ru_maxrss)
        self._exited.set_result(status)

    def _spawn(self) -> None:
        request_fd = self._own(os.memfd_create("request"))
        with open(request_fd, "wb", closefd=False) as target:
            marshal.dump(boot_request(self.request, self._home, self._place, self._uid, self._keep), target)
        os.lseek(request_fd, 0, os.SEEK_SET)
        self._ready, ready_write = map(self._own, os.pipe())
        self._out, out_write = map(self._own, os.pipe())
        stdin_write = -1
        if self.request.stdin is None:
            stdin_read = self._own(os.open(os.devnull, os.O_RDONLY))
        else:
            stdin_read, stdin_write = map(self._own, os.pipe())
        _forget_peak()
        process = subprocess.Popen(
            boot_command(self._home.lib, request_fd, ready_write),
            stdin=stdin_read,
            stdout=out_write,
            stderr=subprocess.STDOUT,
            cwd="/",
            env=environment(self.request, self._home, self._place, self._uid, self._mark),
            pass_fds=(request_fd, ready_write),
            start_new_session=True,
        )
        process.returncode = 0  # this class reaps it, with its usage; Popen must not
        self._pid = process.pid
        self._family.mains[self._pid] = self._mark
        for fd in (request_fd, ready_write, out_write, stdin_read):
            self._close(fd)
        self._listen(stdin_write)

    def _listen(self, stdin_write: int) -> None:
        for fd in (self._out, self._ready):
            os.set_blocking(fd, False)
        self._loop.add_reader(self._out, self._on_output)
        if stdin_write >= 0:
            os.set_blocking(stdin_write, False)
            self._loop.add_writer(stdin_write, self._feed, stdin_write, [memoryview(self.request.stdin or b"")])

    def _take(self) -> bool:
        """Take what the pipe holds, within the cap; False if nothing is left to take."""
        try:
            data = os.read(self._out, _CHUNK)
        except BlockingIOError:
            return False
        room = self._cap - len(self._output)
        self._output += data[:room]
        if len(data) > room:
            self._stopped = self._stopped or "output"
            return False
        return bool(data)

    def _on_output(self) -> None:
        if not self._take():
            self._loop.remove_reader(self._out)
            if self._stopped:
                self.stop(self._stopped)

    def _drain(self) -> None:
        """Take what stands in the pipe; a writer that could not be killed is not waited for."""
        self._loop.remove_reader(self._out)
        while self._take():
            pass

    def _feed(self, fd: int, rest: list[memoryview]) -> None:
        try:
            rest[0] = rest[0][os.write(fd, rest[0][:_CHUNK]) :]
        except BlockingIOError:
            return
        except BrokenPipeError:  # it reads no more
            rest[0] = rest[0][:0]
        if not rest[0]:
            self._close(fd)

    async def _watch_memory(self) -> None:
        limit = (self.request.memory_mib + _MEMORY_SLACK_MIB) << 10
        while True:
            await asyncio.sleep(_MEMORY_LOOK_S)
            if memory_kib(self._family.members(self._pid, self._uid), limit) > limit:
                self.stop("memory")

    def _fence_stood(self) -> bool:
        try:
            return os.read(self._ready, 1) == b"1"
        except BlockingIOError:
            return False

    def _own(self, fd: int) -> int:
        self._descriptors.append(fd)
        return fd

    def _close(self, fd: int) -> None:
        self._loop.remove_reader(fd)
        self._loop.remove_writer(fd)
        self._descriptors.remove(fd)
        os.close(fd)

    def _close_all(self) -> None:
        for fd in list(self._descriptors):
            self._close(fd)

    def _tail(self) -> str:
        """Give the last line of the output."""
        return bytes(self._output[-4096:]).decode("utf-8", "replace").rstrip("\n").rpartition("\n")[2]

    def _outcome(self, wait_status: int, fork_ms: float, exec_ms: float) -> Outcome:
        code = os.waitstatus_to_exitcode(wait_status)
        number = -code if code < 0 else None
        cpu_limit_s = self.request.own_limits.get("time_s")
        status = self._stopped or natural_status(code, self._used.cpu_s, cpu_limit_s, self._tail())
        if status == "timeout":
            if self._output and not self._output.endswith(b"\n"):
                self._output += b"\n"
            self._output += f"timeout after {self.request.wall_s:g}s\n".encode()
        return Outcome(
            output=bytes(self._output),
            exit_code=wire_exit_code(code, status),
            status=status,
            signal=number,
            cpu_time_ms=round(self._used.cpu_s * 1e3, 3),
            max_rss_kib=self._used.max_rss_kib,
            fork_time_ms=round(fork_ms, 3),
            exec_time_ms=round(exec_ms, 3),
        )


def _forget_peak() -> None:
    """Forget this process's own peak of memory: a child's peak begins with its parent's, even across an exec."""
    with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w") as peak:
        peak.write("5")


async def finish(execution: Execution) -> Outcome:
    """Run an exec to its end even if the caller is cancelled meanwhile: then it is stopped first.

    Raises:
        BringupFailed: It never started.
    """
    task = asyncio.ensure_future(execution.run())
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        execution.stop("cancelled")
        with contextlib.suppress(BringupFailed):
            await task
        raise
