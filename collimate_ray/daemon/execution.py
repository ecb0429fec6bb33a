"""One exec in a session's processes: feed its input, read its output, stop it at a limit, say how it ended.

Must not know of HTTP or admission. Source: design/WIRE.md (ExecResponse, time-out, 16 MiB, status).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import time
from typing import Any

from collimate_ray.daemon.cell import Cell
from collimate_ray.daemon.outcome import (
    BringupFailed,
    CellLost,
    ExecRequest,
    Outcome,
    natural_status,
    wire_exit_code,
)
from collimate_ray.daemon.processes import memory_kib, tree_of
from collimate_ray.daemon.zygote import memory_file
from collimate_ray.runner.channel import Stopwatch

#: Bytes taken from the pipe at a time: what a pipe holds on Linux.
_CHUNK = 1 << 16
#: How often an exec's own time, and the memory of its processes together, are looked at, s.
_LOOK_S = 0.1
#: What the interpreters and the runner's keeper may take beyond the limit, MiB.
_MEMORY_SLACK_MIB = 128
#: A session that was told to end its exec and does not say so within this time is killed, s.
_STOP_S = 5.0


class Execution:
    """One running exec.

    Args:
        request: What to run.
        cell: Where.
        argv: What the template starts code with, or () for its own interpreter.
    """

    def __init__(self, request: ExecRequest, cell: Cell, argv: tuple[str, ...] = ()) -> None:
        self.request, self.cell, self._argv = request, cell, argv
        self._loop = asyncio.get_running_loop()
        self._output = bytearray()
        self._stopped = ""
        self._killer: asyncio.TimerHandle | None = None
        self._descriptors: list[int] = []
        self._oom_before = 0

    async def run(self) -> Outcome:
        """Run it to its end; nothing of it lives afterwards.

        Raises:
            BringupFailed: It never started.
            CellLost: Its session or zygote died under it.
        """
        started = time.monotonic()
        try:
            seen = await self._begin_and_watch()
            if not self._has_begun() and not self._stopped and self.cell.was_stopped:
                # the word that ended the exec before this one came late, and hit the process that had this one's
                # request: nothing of it ran
                self._close_all()
                seen = await self._begin_and_watch()
            ended = time.monotonic()
            self._drain()
            self._check_begun()
            self._check_not_killed(seen)
            return self._outcome(seen, started, ended)
        except OSError as error:
            raise BringupFailed(f"the exec can't be started: {error.strerror}") from error
        finally:
            self._close_all()
            self._remove_made()

    def _remove_made(self) -> None:
        """Remove what the exec's process made in the machine's own /tmp for the request's files."""
        for path in self.cell.began.result()["made"] if self._has_begun() else ():
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)

    async def _begin_and_watch(self) -> dict[str, Any]:
        """Start it and wait for its end, which is given as the session told it."""
        self._begin()
        timer = self._loop.call_later(self.request.wall_s, self.stop, "timeout")
        watch = self._loop.create_task(self._watch())
        try:
            return await asyncio.shield(self.cell.ended)
        except CellLost:
            if not self._stopped or self.cell.zygote.is_lost():
                raise
            return {"ended": 9, "cpu_s": 0.0, "rss_kib": 0}  # it had to be killed with its session
        finally:
            timer.cancel()
            watch.cancel()
            if self._killer is not None:
                self._killer.cancel()

    def _check_begun(self) -> None:
        if not self._has_begun() and not self._stopped:
            self.cell.kill()
            raise BringupFailed(f"the exec's fence can't be built: {self._tail()[:300]}")

    def _check_not_killed(self, seen: dict[str, Any]) -> None:
        """The end of an exec whose session was killed from outside tells nothing of it."""
        if seen.get("killed") and not self._stopped:
            raise CellLost("the session was killed", False)

    def stop(self, why: str) -> None:
        """End it; the first reason counts.

        Args:
            why: ``timeout``, ``output``, ``memory`` or ``cancelled``.
        """
        if self.cell.ended.done():
            return
        self._stopped = self._stopped or why
        if self._killer is None:
            self.cell.stop()
            self._killer = self._loop.call_later(_STOP_S, self.cell.kill)

    def _begin(self) -> None:
        request, group = self.request, self.cell.group
        if group is not None:
            group.set(request.memory_mib + _MEMORY_SLACK_MIB, int(request.all_limits["processes"]) + 1)
            self._oom_before = group.oom_kills()
        request_fd = self._own(memory_file(json.dumps(self._body()).encode("ascii")))
        self._out, out_write = map(self._own, os.pipe())
        stdin_write = -1
        if request.stdin is None:
            stdin_read = self._own(os.open(os.devnull, os.O_RDONLY))
        else:
            stdin_read, stdin_write = map(self._own, os.pipe())
        self.cell.begin(self._header(), [request_fd, out_write, stdin_read])
        for fd in (request_fd, out_write, stdin_read):
            self._close(fd)
        os.set_blocking(self._out, False)
        self._loop.add_reader(self._out, self._on_output)
        if stdin_write >= 0:
            os.set_blocking(stdin_write, False)
            self._loop.add_writer(stdin_write, self._feed, stdin_write, [memoryview(request.stdin or b"")])

    def _header(self) -> dict[str, Any]:
        request = self.request
        own = request.own_limits
        bounded = () if request.kind == "runner" else ("memory_mib", "processes", "files", "file_mib")
        return {
            "kind": "argv" if self._argv and request.kind == "code" else request.kind,
            "seed": request.seed,
            "limits": {name: int(request.all_limits[name]) for name in bounded},
            # a guard for the daemon's own death; own time is judged by a clock here
            "cpu_s": math.ceil(own["time_s"]) + 1 if "time_s" in own else None,
        }

    def _body(self) -> dict[str, Any]:
        request = self.request
        if request.kind == "runner" and not request.files:
            return {}
        if request.kind == "command":
            return {"argv": ["sh", "-c", request.text], "files": request.files}
        if self._argv:
            return {"argv": self._argv, "code": request.text, "files": request.files}
        return {"text": request.text, "files": request.files}

    def _take(self) -> bool:
        """Take what the pipe holds, within the cap; False if nothing is left to take."""
        try:
            data = os.read(self._out, _CHUNK)
        except BlockingIOError:
            return False
        room = self.request.output_bytes - len(self._output)
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

    async def _watch(self) -> None:
        """Look at own time, and at memory where no cgroup does."""
        time_s = self.request.own_limits.get("time_s")
        clock = Stopwatch(self.cell.pid, time_s, self.request.wall_s) if time_s is not None else None
        if clock is not None:
            clock.start()
        limit_kib = (self.request.memory_mib + _MEMORY_SLACK_MIB) << 10
        while True:
            await asyncio.sleep(_LOOK_S)
            if clock is not None:
                clock.look()
                if clock.left() <= 0:
                    self.stop("timeout")
            if self._was_short_of_memory() or (
                self.cell.group is None and memory_kib(tree_of(self.cell.pid), limit_kib) > limit_kib
            ):
                self.stop("memory")

    def _has_begun(self) -> bool:
        began = self.cell.began
        return began.done() and began.exception() is None

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

    def _was_short_of_memory(self) -> bool:
        group = self.cell.group
        return group is not None and group.oom_kills() > self._oom_before

    def _tail(self) -> str:
        """Give the last line of the output."""
        return bytes(self._output[-4096:]).decode("utf-8", "replace").rstrip("\n").rpartition("\n")[2]

    def _outcome(self, seen: dict[str, Any], started: float, ended: float) -> Outcome:
        code = os.waitstatus_to_exitcode(seen["ended"])
        cpu_limit_s = self.request.own_limits.get("time_s")
        status = self._stopped or natural_status(code, seen["cpu_s"], cpu_limit_s, self._tail())
        # a runner goes on without the candidate that was killed
        if (status in ("signal", "exit") or self.request.kind == "runner") and self._was_short_of_memory():
            status = "memory"
        if status == "timeout":
            if self._output and not self._output.endswith(b"\n"):
                self._output += b"\n"
            self._output += f"timeout after {self.request.wall_s:g}s\n".encode()
        began_at = self.cell.began_at if self._has_begun() else ended
        return Outcome(
            output=bytes(self._output),
            exit_code=wire_exit_code(code, status),
            status=status,
            signal=-code if code < 0 else None,
            cpu_time_ms=round(seen["cpu_s"] * 1e3, 3),
            max_rss_kib=seen["rss_kib"],
            fork_time_ms=round((began_at - started) * 1e3, 3),
            exec_time_ms=round((ended - began_at) * 1e3, 3),
            pins=tuple(self.cell.began.result()["pins"]) if self._has_begun() else (),
        )


async def finish(execution: Execution) -> Outcome:
    """Run an exec to its end even if the caller is cancelled meanwhile: then it is stopped first.

    Raises:
        BringupFailed: It never started.
        CellLost: Its session or zygote died under it.
    """
    task = asyncio.ensure_future(execution.run())
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        execution.stop("cancelled")
        with contextlib.suppress(BringupFailed, CellLost):
            await task
        raise
