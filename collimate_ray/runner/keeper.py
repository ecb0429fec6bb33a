"""The keeper: a session's main process. Reads the request, drives the candidate, writes one report.

The candidate's launcher is forked before the request is read (measured: forked after, a candidate finds tests and
answers in its own memory). The report is one line, signed with the request's nonce, which no candidate's process has
ever held. Nothing is judged here but ``assert_tests``, whose test code must run while the candidate does.
"""

from __future__ import annotations

import base64
import os
import shutil
import socket
import tempfile
import zlib
from typing import Any

from collimate_ray.jail.process import harden_keeper, interpreter_readable
from collimate_ray.runner.asserts import run_asserts
from collimate_ray.runner.cases import run_calls, run_programs
from collimate_ray.runner.launcher import launch
from collimate_ray.runner.runs import Runs
from collimate_ray.values import dumps, loads

#: What a report's line begins with; the host counts lines that have it and not the nonce.
REPORT_MARK = "collimate-report"

#: The user a candidate becomes where the keeper is root and nobody named another: nobody.
_NOBODY = 65534


def main(request_path: str = "") -> None:
    """Serve one request.

    Args:
        request_path: A file that holds it, removed as soon as it is open; "": it comes on standard input.
    """
    harden_keeper()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    report_fd = os.dup(1)
    if os.fork() == 0:
        ours.close()
        os.close(report_fd)
        launch(theirs)
    theirs.close()
    request = _read_request(request_path)
    _silence()
    line = _signed(request["nonce"], _report(request, ours))
    os.write(report_fd, b"\n")
    left = memoryview(line)
    while left:
        left = left[os.write(report_fd, left) :]
    ours.close()
    os.wait()
    os._exit(0)


def _read_request(path: str) -> dict[str, Any]:
    if path:
        with open(path, encoding="ascii") as text:
            os.unlink(path)
            return loads(text.read().strip())  # type: ignore[no-any-return]
    chunks: list[bytes] = []
    while True:
        chunk = os.read(0, 1 << 20)
        if not chunk:
            return loads(b"".join(chunks).decode("ascii"))  # type: ignore[no-any-return]
        chunks.append(chunk)


def _silence() -> None:
    """Test code prints where it likes: not into the report."""
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)


def _candidate_uid() -> int | None:
    """Give the user that candidates become, or None: they stay this one's."""
    if os.geteuid() != 0:
        return None
    if "COLLIMATE_CANDIDATE_UID" in os.environ:
        return int(os.environ["COLLIMATE_CANDIDATE_UID"])
    return _NOBODY if interpreter_readable() else None


def _report(request: dict[str, Any], launcher: socket.socket) -> dict[str, Any]:
    if request["root_only"] and os.geteuid() != 0:
        return {"refused": "this daemon starts execs without root: test code and candidate would share a user"}
    top = tempfile.mkdtemp(prefix="collimate-run-")
    os.chmod(top, 0o711)
    runs = Runs(launcher, request, _candidate_uid(), top)
    try:
        report = _KINDS[request["kind"]](request, runs)
    finally:
        runs.close()
        shutil.rmtree(top, ignore_errors=True)
    report["evidence"] = runs.evidence
    report["rss_kib"] = runs.rss_kib
    return report


_KINDS = {"calls": run_calls, "programs": run_programs, "asserts": run_asserts}


def _signed(nonce: str, report: dict[str, Any]) -> bytes:
    body = base64.b64encode(zlib.compress(dumps(report).encode("ascii"), 1))
    return " ".join([REPORT_MARK, nonce, body.decode("ascii")]).encode("ascii") + b"\n"
