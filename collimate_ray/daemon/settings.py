"""What a daemon is told at its start, checked. Must not start anything. Source: design/API.md and WIRE.md."""

from __future__ import annotations

import ipaddress
import os
from dataclasses import dataclass, field

from collimate_ray.errors import ConfigError
from collimate_ray.sandbox.wire import MAX_SOCKET_PATH_BYTES, TIERS

#: Uids of one daemon's sessions, and so the most sessions that it keeps at once.
MAX_SESSIONS = 1024

#: MiB that an exec is counted with, and limited to, where it does not say (design: API, limits).
DEFAULT_MEMORY_MIB = 1024


def default_slots() -> int:
    """Give execs at a time for this machine: half the cores this process may use, times 4, at least 1."""
    return max(1, len(os.sched_getaffinity(0)) * 2)


def default_memory_mib() -> int:
    """Give MiB for all execs together on this machine: a quarter of its memory, at least one exec's."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(DEFAULT_MEMORY_MIB, (total >> 20) // 4)


@dataclass(frozen=True)
class DaemonConfig:
    """How to serve. Give ``socket``, or ``host`` and ``port``.

    Attributes:
        socket: Path of the unix socket, at most 107 bytes; its directory must be private (0700), or is made.
        host: Loopback address or ``localhost``.
        port: TCP port, 0 to 65535; 0 lets the kernel choose.
        slots: Execs at a time, at least 1.
        memory_mib: Sum of the memory limits of running execs, MiB, at least 1.
        linger_s: Exit after so many seconds without request, exec or owner's lease; None: never.
        idle_s: A session unused for so many seconds is reaped.
        long_s: An exec that ran for so many seconds leaves its slot to others.
        json: Also write one JSON line to stdout when ready.
        templates: Directory of the user's own templates, or None.
        tier: Enter this tier and no other; None: the best that the machine gives.
        require_tier: Refuse to serve below this tier.
        allow_unsafe: Serve in the tiers ``seccomp`` and ``rlimits`` too.
        max_landlock_abi: Take the kernel's Landlock for one of this age, at least 0; None: as it is.
        cgroups: Use cgroups where they can be used.
        verbose: Log each session and exec, not only what went wrong.
    """

    socket: str | None = None
    host: str | None = None
    port: int | None = None
    slots: int = field(default_factory=default_slots)
    memory_mib: int = field(default_factory=default_memory_mib)
    linger_s: float | None = None
    idle_s: float = 3600.0
    long_s: float = 2.0
    json: bool = False
    templates: str | None = None
    tier: str | None = None
    require_tier: str | None = None
    allow_unsafe: bool = False
    max_landlock_abi: int | None = None
    cgroups: bool = True
    verbose: bool = False

    def check(self) -> None:
        """Check all fields.

        Raises:
            ConfigError: One line that names field, value found and what was expected.
        """
        if (self.socket is None) == (self.port is None):
            raise ConfigError("serve: expected a socket path, or a host and port; found both or neither")
        if self.socket is not None:
            _check_path(self.socket)
        if self.port is not None and not 0 <= self.port <= 65535:
            raise ConfigError(f"port: expected 0 to 65535, found {self.port}")
        if self.host is not None and not _is_loopback(self.host):
            raise ConfigError(f"host: expected a loopback address such as 127.0.0.1, found {self.host!r}")
        for name in ("tier", "require_tier"):
            value = getattr(self, name)
            if value is not None and value not in TIERS:
                raise ConfigError(f"{name}: expected one of {', '.join(TIERS)}, found {value!r}")
        self._check_numbers()

    def _check_numbers(self) -> None:
        for name in ("slots", "memory_mib"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: expected at least 1, found {getattr(self, name)}")
        if self.slots > MAX_SESSIONS:
            raise ConfigError(f"slots: expected at most {MAX_SESSIONS}, found {self.slots}")
        for name in ("linger_s", "idle_s", "long_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"{name}: expected more than 0 seconds, found {value}")


def _check_path(path: str) -> None:
    length = len(os.fsencode(os.path.abspath(path)))
    if not path or "\0" in path:
        raise ConfigError(f"socket: expected a path, found {path!r}")
    if length > MAX_SOCKET_PATH_BYTES:
        raise ConfigError(f"socket: expected a path of at most {MAX_SOCKET_PATH_BYTES} bytes, found {length}: {path}")


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
