"""Cases that are judged elsewhere: calls of a function, runs of a program. No expected value is ever here."""

from __future__ import annotations

import base64
import os
from typing import Any

from collimate_ray.runner.channel import Stopwatch, TimeUp
from collimate_ray.runner.runs import Run, Runs, Talk, ended
from collimate_ray.values import dumps

#: Records that leave a candidate's process usable for the next case.
_ALIVE = ("ok", "exc", "memory")

#: Most bytes of all answers of one request together; the case that passes it is over its output limit.
_MAX_ANSWERS = 32 << 20

#: Read at once, bytes.
_CHUNK = 1 << 18


def run_calls(request: dict[str, Any], runs: Runs) -> dict[str, Any]:
    """Call the entry once a case, all in one process; a new one takes over where a case breaks it."""
    records: list[dict[str, Any]] = []
    talk: Talk | None = None
    room = _MAX_ANSWERS
    for place, args in enumerate(request["cases"]):
        load = {"s": "ok"}
        if talk is None:
            talk = Talk(runs)
            load = talk.load(request)
            if load["s"] != "ok" and place == 0:
                talk.close()
                return {"load": load, "cases": []}
        talk.renew()
        record = talk.ask("call", args, request["entry"]) if load["s"] == "ok" else load
        room -= len(dumps(record.get("v")))
        if room < 0:
            record = {"s": "output"}
        records.append(record)
        if record["s"] not in _ALIVE:
            talk.close()
            talk = None
        if request["stop_early"] and record["s"] != "ok":
            break
    if talk is not None:
        talk.close()
    return {"load": {"s": "ok"}, "cases": records}


def run_programs(request: dict[str, Any], runs: Runs) -> dict[str, Any]:
    """Run the candidate as a program once a case, each time from a clean process."""
    records: list[dict[str, Any]] = []
    room = _MAX_ANSWERS
    for stdin in request["cases"]:
        record = _run_program(request, runs, base64.b64decode(stdin))
        room -= len(record.get("out", ""))
        if room < 0:
            record = {"s": "output"}
        records.append(record)
        if request["stop_early"] and record["s"] != "ok":
            break
    return {"load": {"s": "ok"}, "cases": records}


def _run_program(request: dict[str, Any], runs: Runs, stdin: bytes) -> dict[str, Any]:
    stdin_read, stdin_write = os.pipe()
    stdout_read, stdout_write = os.pipe()
    note_read, note_write = os.pipe()
    null = os.open(os.devnull, os.O_RDWR)
    files = {"candidate.py": request["code"], "prelude.py": request["prelude"]}
    for fd in (stdin_read, stdout_write):
        os.fchmod(fd, 0o666)  # /dev/stdin is opened anew, by another user
    try:
        run = runs.start("program", [stdin_read, stdout_write, null, note_write], files)
    finally:
        for fd in (stdin_read, stdout_write, note_write, null):
            os.close(fd)
    flow = _Flow(run, stdin_write, stdin, stdout_read, int(runs.limits["output_mib"]) << 20)
    record = flow.record(runs.clock(run.pid), note_read)
    for fd in (stdout_read, note_read):
        os.close(fd)
    return record


class _Flow:
    """A program's input going in while its output comes out, bounded."""

    def __init__(self, run: Run, stdin_fd: int, stdin: bytes, stdout_fd: int, most: int) -> None:
        self._run = run
        self._stdin_fd: int | None = stdin_fd
        self._left = memoryview(stdin)
        self._stdout_fd = stdout_fd
        self._open = True
        self._most = most
        self._out = bytearray()
        os.set_blocking(stdin_fd, False)
        os.set_blocking(stdout_fd, False)

    def record(self, clock: Stopwatch, note_fd: int) -> dict[str, Any]:
        """Run to the end, and give the record."""
        clock.start()
        cut = self._pump(clock)
        clock.stop()
        self._close_stdin()
        seen = self._run.finish()
        while self._open and not cut:  # nothing holds the pipe any more
            self._read()
            if len(self._out) > self._most:
                cut = "output"
        record: dict[str, Any] = {"s": cut} if cut else ended(seen["status"])
        note = os.read(note_fd, 2)
        if note[:1] != b".":
            record = {"s": "prelude", "exc": ["", record["s"], ""]}
        elif record == {"s": "exit", "code": 0}:
            record = {"s": "ok"}
        elif record["s"] == "exit" and note[1:] == b"M":
            record = {"s": "memory"}
        if not cut:
            record["out"] = base64.b64encode(self._out).decode("ascii")
        record.update(cpu_ms=round(1000 * seen["cpu_s"], 3), wall_ms=round(1000 * clock.wall, 3))
        return record

    def _pump(self, clock: Stopwatch) -> str:
        """Move bytes until the program ends; give what cut it short, or ""."""
        self._write()
        while not self._run.exited:
            fds = [(self._stdout_fd, False)] if self._open else []
            if self._stdin_fd is not None:
                fds.append((self._stdin_fd, True))
            try:
                ready = self._run.wait_ready(fds, clock)
            except TimeUp:
                return "timeout"
            if self._stdin_fd in ready:
                self._write()
            if self._stdout_fd in ready:
                self._read()
            if len(self._out) > self._most:
                return "output"
        return ""

    def _write(self) -> None:
        if self._stdin_fd is None:
            return
        try:
            while self._left:
                self._left = self._left[os.write(self._stdin_fd, self._left[:_CHUNK]) :]
        except BlockingIOError:
            return
        except OSError:
            pass  # the program does not read on: its right
        self._close_stdin()

    def _close_stdin(self) -> None:
        if self._stdin_fd is not None:
            os.close(self._stdin_fd)
            self._stdin_fd = None

    def _read(self) -> None:
        try:
            chunk = os.read(self._stdout_fd, _CHUNK)
        except BlockingIOError:
            return
        self._out += chunk
        self._open = bool(chunk)
