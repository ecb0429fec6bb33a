"""Finds or starts the embedded daemon of a key: one for each Ray node id, or one of the user's own (``"local"``).

The daemon is nobody's child: Ray kills the children of its workers, and a daemon serves several processes. It ends by
itself 60 s after its last request, exec and lease. Must not import ``daemon/``: it is another process.
Source: design/DESIGN.md, "Ray".
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import logging
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from collimate_ray.config import daemon_environment, runtime_dir
from collimate_ray.errors import ConfigError, InfraError, SandboxUnavailable, WireError
from collimate_ray.sandbox.body import Json
from collimate_ray.sandbox.client import SandboxClient
from collimate_ray.sandbox.tier import check_tier, checked_tier
from collimate_ray.sandbox.transport import checked_path

log = logging.getLogger(__name__)

#: Characters of the key that name the daemon; twelve of a Ray node id keep the path under 107 bytes.
KEY_CHARS = 12

#: A daemon without requests, execs and leases ends after so long, s (DESIGN.md).
LINGER_S = 60

#: Longest wait for a started daemon's first answer, s; on two cores at a load of 11 it took 7.
START_S = 30.0

#: Longest wait for another process that is starting the daemon, s: its tries and their pauses, and room.
LOCK_S = 60.0

#: Longest wait for a daemon's health, s; on a loaded machine an answer may take a second.
PROBE_S = 5.0

#: Longest wait for a daemon to finish its running execs before it is told to kill them, s.
DRAIN_S = 20.0

#: Pauses before each try to start a daemon, s: an older one that is on its way out still holds the place, not for long.
_AGAIN_S = (0.0, 0.1, 0.4, 1.6)

#: The log of a daemon that crashed is kept for so long, s; any other daemon removes its own.
LOG_KEPT_S = 86_400.0

#: Pause between two looks at what another process does, s.
_POLL_S = 0.02

#: Run by an interpreter of its own, since a fork in a process with threads is not safe: sets the daemon free of its
#: starter (parent, session, signal mask, umask; stdout too, which is the pipe that tells its pid) and becomes it.
_DETACH = """
import os, signal, sys
pid = os.fork()
if pid:
    print(pid)
    sys.exit()
os.setsid()
os.umask(0o077)
os.dup2(2, 1)
signal.pthread_sigmask(signal.SIG_SETMASK, ())
os.execv(sys.argv[1], sys.argv[1:])
"""

#: The daemon: ``collimate-ray serve``, which removes its log (the first argument) when it ends in order.
_SERVE = """
import os, sys
from collimate_ray.cli import main
code = main(sys.argv[2:])
if not code and os.path.exists(sys.argv[1]):
    os.unlink(sys.argv[1])
sys.exit(code)
"""


@dataclass(frozen=True)
class Daemon:
    """A live embedded daemon.

    Attributes:
        socket: Path of its socket.
        pid: Its process id.
        started: True if this call started it, False if it was found.
    """

    socket: str
    pid: int
    started: bool


def ensure_daemon(
    key: str, *, slots: int | None = None, memory_mib: int | None = None, require_tier: str | None = None
) -> Daemon:
    """Find the daemon of ``key``, or start it. Safe to call from many processes at once: they all get the same one.

    Args:
        key: Names the daemon by its first 12 characters: letters, digits, ``_`` and ``-``.
        slots: Execs in flight that a started daemon admits; its own default if None.
        memory_mib: Memory for all execs of a started daemon, MiB; its own default if None.
        require_tier: Isolation tier that it must have at least, one of ``wire.TIERS``, or None.

    Raises:
        ConfigError: The key can't name a directory, the place for sockets is not ours, or the daemon that is there
            has a lower tier.
        SandboxUnavailable: The daemon is there and does not answer, it did not start within 30 s, or another process
            that is starting it is stuck.
        WireError: What listens in its place is no daemon of ours.
    """
    name = key[:KEY_CHARS]
    if not re.fullmatch(r"[A-Za-z0-9_-]+", name):
        raise ConfigError(f"key: expected letters, digits, '_' and '-', found {key!r}")
    checked_tier(require_tier)
    path = checked_path(str(runtime_dir() / name / "serve.sock"))
    found = _probe(path)
    if not found:
        with _locked(runtime_dir() / f"{name}.lock"):
            found = _probe(path)  # another process may have been faster
            if not found:
                return Daemon(path, _start(path, slots, memory_mib, require_tier), True)
    check_tier(found, require_tier, path)
    return Daemon(path, found["pid"], False)


def stop_daemon(daemon: Daemon) -> None:
    """End a daemon: it finishes what runs (20 s at most), removes its socket and exits. Nothing if it is gone.

    Raises:
        SandboxUnavailable: It is still there 10 s after it was told to kill what runs.
    """
    if _probe(daemon.socket).get("pid") != daemon.pid:
        return
    for patience_s in (DRAIN_S, 10.0):  # the daemon takes a second SIGTERM for "now"
        with contextlib.suppress(ProcessLookupError):
            os.kill(daemon.pid, signal.SIGTERM)
        if _until(lambda: not (os.path.exists(daemon.socket) or _running(daemon.pid)), patience_s):
            folder = Path(daemon.socket).parent
            folder.with_suffix(".log").unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # gone already, or somebody else put something there
                folder.rmdir()
            return
    raise SandboxUnavailable(f"daemon {daemon.pid} at {daemon.socket}: did not end on SIGTERM")


def _probe(path: str) -> Json:
    """Give the health of the daemon that answers at ``path``; empty if none listens there, any more."""
    end = time.monotonic() + PROBE_S
    while _listened(path):
        try:
            return _asked(path)
        except SandboxUnavailable:  # it may be ending just now: then nobody listens the next time
            if time.monotonic() > end:
                raise
            time.sleep(_POLL_S)
    return {}


def _asked(path: str) -> Json:
    with SandboxClient(unix_socket=path, timeout=PROBE_S, retries=0) as client:
        health = client.health()
    if not isinstance(health.get("pid"), int):
        raise WireError(f"{path}: what answers there is no daemon of ours: its health has no pid")
    return health


def _listened(path: str) -> bool:
    """Tell whether a process of this user listens at ``path``."""
    with socket.socket(socket.AF_UNIX) as probe:
        # a time-out of Python's would make a full backlog an error at once; the kernel's waits for room
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(PROBE_S), 0))
        try:
            probe.connect(path)
        except (FileNotFoundError, ConnectionRefusedError):
            return False
        except OSError as error:
            raise SandboxUnavailable(f"{path}: {error.strerror}", None, False) from error
        # struct ucred: pid, uid, gid
        peer = probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    uid = int.from_bytes(peer[4:8], sys.byteorder)
    if uid != os.getuid():
        raise ConfigError(f"{path}: expected a daemon of uid {os.getuid()}, found one of uid {uid}")
    return True


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock among processes, whose file is there only while one of them is inside or waits."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            if not _until(functools.partial(_flocked, descriptor), LOCK_S):
                raise SandboxUnavailable(f"{path}: held by another process for {LOCK_S:g} s", None, False)
            # its last holder unlinked it: only a lock on the file that has the name now counts
            if not _is_named(descriptor, path):
                continue
            try:
                yield
            finally:
                path.unlink(missing_ok=True)
            return
        finally:
            os.close(descriptor)


def _flocked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_named(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _start(path: str, slots: int | None, memory_mib: int | None, require_tier: str | None) -> int:
    """Start a daemon and wait for its first answer; gives its pid."""
    log_path = Path(path).parent.with_suffix(".log")
    _sweep_logs(log_path.parent)
    options = {"--slots": slots, "--memory-mib": memory_mib, "--require-tier": require_tier}
    for pause_s in _AGAIN_S:
        time.sleep(pause_s)
        pid = _detached(_command(path, log_path, options), log_path)
        if _until(functools.partial(_answers_or_ended, path, pid), START_S) and _running(pid):
            log.info("embedded daemon %d started at %s", pid, path)
            return pid
        if _running(pid):
            os.kill(pid, signal.SIGKILL)
            break
    raise _not_started(log_path)


def _answers_or_ended(path: str, pid: int) -> bool:
    try:
        return _probe(path).get("pid") == pid or not _running(pid)
    except InfraError:
        return not _running(pid)


def _sweep_logs(folder: Path) -> None:
    """Remove what daemons said whose keys nobody may use again: a Ray node id lives as long as its raylet."""
    for path in folder.glob("*.log"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > LOG_KEPT_S:
                path.unlink()


def _command(path: str, log_path: Path, options: Mapping[str, object]) -> list[str]:
    command = [sys.executable, "-c", _SERVE, str(log_path), "serve", "--socket", path, "--linger-s", str(LINGER_S)]
    for name, value in options.items():
        command += [] if value is None else [name, str(value)]
    return command


def _detached(command: list[str], log_path: Path) -> int:
    """Start ``command`` as no child of ours, with nothing of ours but a few variables; gives its pid."""
    package_root = Path(__file__).parents[2]
    with log_path.open("wb") as errors:
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _DETACH, *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            cwd="/",
            env=daemon_environment(package_root),
            start_new_session=True,
            check=False,
        )
    if done.returncode != 0:
        raise _not_started(log_path)
    return int(done.stdout)


def _until(condition: Callable[[], bool], timeout_s: float) -> bool:
    """Wait for something that another process does; False if it did not come in time."""
    end = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(_POLL_S)
    return True


def _running(pid: int) -> bool:
    """Tell whether the process lives. One that has ended may stay a zombie where no init reaps orphans."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    # the name, in brackets, may hold anything; the state follows it
    return status.rpartition(")")[2].split()[0] not in "ZX"


def _not_started(log_path: Path) -> SandboxUnavailable:
    """Give the error that tells why no daemon started; its log has nothing more to say."""
    told = ["it said nothing"]
    with contextlib.suppress(OSError):
        told += [line for line in log_path.read_text(errors="replace").split("\n") if line.strip()]
        log_path.unlink()
    if told[-1].startswith("see "):  # the command line's hint at its own help
        told.pop()
    return SandboxUnavailable(f"the embedded daemon did not start: {told[-1]}", None, False)
