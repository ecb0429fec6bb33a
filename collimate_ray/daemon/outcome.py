"""What an exec is asked for, and how it ended in the wire's words. Pure.

Source: design/WIRE.md (ExecRequest, ExecResponse, time-out, status) and API.md (limits).
"""

from __future__ import annotations

import math
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field

from collimate_ray.daemon.settings import DEFAULT_MEMORY_MIB
from collimate_ray.sandbox.wire import MAX_OUTPUT_BYTES


class BringupFailed(Exception):
    """The exec's process could not be started or fenced in; nothing of the request ran."""


class CellLost(Exception):
    """The processes of a session died by themselves; what ran in it has no end.

    Args:
        message: One line for people.
        with_zygote: The zygote died, and with it all its sessions: nobody's session did it.
    """

    def __init__(self, message: str, with_zygote: bool) -> None:
        super().__init__(message, with_zygote)
        self.message, self.with_zygote = message, with_zygote


#: Limits of an exec that neither names them nor has a template that does (design: API, limits).
DEFAULT_LIMITS: Mapping[str, float] = {
    "memory_mib": DEFAULT_MEMORY_MIB,
    "output_mib": 16,
    "processes": 64,
    "files": 256,
    "file_mib": 64,
}


@dataclass(frozen=True)
class ExecRequest:
    """One checked exec.

    Attributes:
        exec_id: Chosen by the client, or drawn.
        kind: ``command`` (``sh -c``), ``code`` (Python) or ``runner`` (the preloaded runner).
        text: The script or the code.
        seed: 64 hex characters.
        files: Path and content of each file to write first, in order.
        timeout_s: Wall time, s.
        limits: Wire limits that were given, by name.
        stdin: Bytes for standard input, or None for an empty one.
        template_limits: Of its template: they hold where it names none.
    """

    exec_id: str
    kind: str
    text: str
    seed: str
    files: tuple[tuple[str, str], ...] = ()
    timeout_s: float = 30.0
    limits: Mapping[str, float] = field(default_factory=dict)
    stdin: bytes | None = None
    template_limits: Mapping[str, float] = field(default_factory=dict)

    @property
    def all_limits(self) -> Mapping[str, float]:
        """Its limits over its template's over the daemon's own."""
        return {**DEFAULT_LIMITS, **self.template_limits, **self.limits}

    @property
    def memory_mib(self) -> int:
        """What the exec is admitted with, MiB."""
        return int(self.all_limits["memory_mib"])

    @property
    def own_limits(self) -> Mapping[str, float]:
        """The limits that are kept for the exec itself; the runner keeps its own, for each case."""
        return {} if self.kind == "runner" else {**self.template_limits, **self.limits}

    @property
    def wall_s(self) -> float:
        """Wall time after which it is stopped, s."""
        return min(self.timeout_s, self.own_limits.get("wall_time_s", math.inf))

    @property
    def output_bytes(self) -> int:
        """Output that is kept, bytes."""
        return min(int(self.own_limits.get("output_mib", 16) * (1 << 20)), MAX_OUTPUT_BYTES)


@dataclass(frozen=True)
class Outcome:
    """How an exec ended; see ExecResponse in design/WIRE.md.

    ``status`` is ``cancelled`` besides the wire's words if somebody cancelled it.
    ``max_rss_kib`` is the kernel's peak for the largest process; it begins with what the daemon itself occupies when
    it starts the exec, so a small exec shows the daemon's size.
    """

    output: bytes
    exit_code: int
    status: str
    signal: int | None
    cpu_time_ms: float
    max_rss_kib: int
    fork_time_ms: float
    exec_time_ms: float
    pins: tuple[str, ...] = ()


def natural_status(code: int, cpu_s: float, cpu_limit_s: float | None, last_line: str) -> str:
    """Name the end of an exec that nobody stopped.

    Args:
        code: Exit code, or minus the signal.
        cpu_s: CPU time used, s.
        cpu_limit_s: CPU time allowed, s, or None.
        last_line: Of its output.
    """
    # the kernel sends SIGXCPU at the limit, and a second later SIGKILL to whoever caught that
    by_kernel = code == -signal.SIGXCPU or (code == -signal.SIGKILL and cpu_s >= (cpu_limit_s or 0))
    if cpu_limit_s is not None and by_kernel:
        return "timeout"
    if code < 0:
        return "signal"
    # what an interpreter says when its address space is spent; to claim it falsely only earns another failure
    if code == 1 and last_line.startswith("MemoryError"):
        return "memory"
    return "exit" if code else "ok"


def wire_exit_code(code: int, status: str) -> int:
    """Give the wire's exit code: -1 for a time-out, 128 + N for signal N, 137 for what the daemon killed."""
    if status == "timeout":
        return -1
    if status in ("output", "memory", "cancelled") and code <= 0:
        return 128 + signal.SIGKILL
    return code if code >= 0 else 128 - code
