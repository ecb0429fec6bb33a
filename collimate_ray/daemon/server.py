"""The daemon's life: private directory, sockets, signals, drain, linger, and leaving nothing behind.

Must not know what a request means. Source: design/DESIGN.md ("Ray").
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import resource
import signal
import socket
import stat
import sys
import time
from pathlib import Path

from collimate_ray.config import runtime_dir
from collimate_ray.daemon.home import Home, kept_dirs
from collimate_ray.daemon.http import MAX_HEADER_BYTES, Front
from collimate_ray.daemon.isolation import choose_mode
from collimate_ray.daemon.processes import kill_leftovers
from collimate_ray.daemon.routes import TEMPLATES, TIER, Routes
from collimate_ray.daemon.settings import DaemonConfig
from collimate_ray.daemon.table import Table
from collimate_ray.errors import ConfigError
from collimate_ray.jail import process as jail
from collimate_ray.spec import RUNNER_VERSION, runner_source

_log = logging.getLogger(__name__)

#: Connections that wait to be accepted: a group's worth of clients arrives at once.
_BACKLOG = 1024
#: How often idle sessions, leases and the linger time are looked at, s, at most.
_TICK_S = 1.0
#: Exit code of a daemon that was interrupted (design: API, CLI).
_INTERRUPTED = 130


def serve(config: DaemonConfig) -> int:
    """Serve until told to end. Blocks; must run in the main thread, since it handles signals.

    SIGTERM drains: new work is refused, running execs finish. A second one, or SIGINT, ends at once.

    Args:
        config: How to serve.

    Returns:
        Exit code: 0 after a drain or the linger time, 130 if interrupted.

    Raises:
        ConfigError: A field is wrong, the address is taken, or no exec can run on this machine.
    """
    config.check()
    return asyncio.run(_Daemon(config).run())


class _Daemon:
    def __init__(self, config: DaemonConfig) -> None:
        self._config = config
        self._made_dir: Path | None = None

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        self._over: asyncio.Future[int] = loop.create_future()
        # told to end before it is ready: it must still leave nothing behind
        loop.add_signal_handler(signal.SIGTERM, self._end, 0)
        loop.add_signal_handler(signal.SIGINT, self._end, _INTERRUPTED)
        listener, home = self._claim_address()
        try:
            return await self._run_at(listener, home)
        finally:
            listener.close()
            if self._config.socket is not None:
                Path(self._config.socket).unlink(missing_ok=True)
            home.close()
            if self._made_dir is not None:
                with contextlib.suppress(OSError):  # somebody else put something there
                    self._made_dir.rmdir()

    async def _run_at(self, listener: socket.socket, home: Home) -> int:
        _prepare_process()
        home.install(runner_source())
        if killed := kill_leftovers(home.digest, home.in_uid_range):
            _log.warning("killed %d processes that an earlier daemon left", killed)
        keep = kept_dirs()
        table = Table(self._config, home, keep)
        isolation = await choose_mode(home, keep, table.family)
        self._table = table
        self._front = Front(Routes(table, isolation, RUNNER_VERSION).handle)
        self._handle_signals()
        server = await self._listen(listener)
        self._say_ready(listener, isolation)
        ticker = asyncio.ensure_future(self._tick())
        code = await self._over
        ticker.cancel()
        server.close()
        if code:
            await self._front.close()  # no answer: what was cut off must not look like a result
        await table.close()
        await self._front.close()
        return code

    def _claim_address(self) -> tuple[socket.socket, Home]:
        if self._config.socket is None:
            listener = _bind_tcp(self._config.host or "127.0.0.1", self._config.port or 0)
            return listener, Home(runtime_dir() / f"tcp-{listener.getsockname()[1]}")
        path = Path(os.path.abspath(self._config.socket))
        if not path.parent.exists():
            path.parent.mkdir(mode=0o700, parents=True)
            self._made_dir = path.parent
        _check_private(path.parent)
        home = Home(path.with_name(f"{path.name}.d"))
        try:
            return _bind_unix(path), home
        except BaseException:
            home.close()
            raise

    async def _listen(self, listener: socket.socket) -> asyncio.Server:
        if self._config.socket is not None:
            return await asyncio.start_unix_server(
                self._front.serve, sock=listener, limit=MAX_HEADER_BYTES, backlog=_BACKLOG
            )
        return await asyncio.start_server(self._front.serve, sock=listener, limit=MAX_HEADER_BYTES, backlog=_BACKLOG)

    def _handle_signals(self) -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGCHLD, self._table.on_child)
        loop.add_signal_handler(signal.SIGTERM, self._drain)

    def _drain(self) -> None:
        if self._table.gate.draining:
            self._end(_INTERRUPTED)
            return
        _log.info("draining: %d execs run", len(self._table.execs))
        self._table.gate.drain()
        self._draining = asyncio.ensure_future(self._end_when_quiet())

    async def _end_when_quiet(self) -> None:
        while self._table.execs or self._front.busy:
            await asyncio.sleep(0.02)
        self._end(0)

    def _end(self, code: int) -> None:
        if not self._over.done():
            self._over.set_result(code)

    async def _tick(self) -> None:
        spans = [_TICK_S, self._config.idle_s / 4, (self._config.linger_s or _TICK_S) / 4]
        while True:
            await asyncio.sleep(min(spans))
            await self._table.reap()
            if self._may_leave():
                _log.info("nobody needed this daemon for %g s: it ends", self._config.linger_s)
                self._table.gate.drain()
                self._end(0)

    def _may_leave(self) -> bool:
        if self._config.linger_s is None or self._front.busy or self._table.execs or self._table.owners:
            return False
        return time.monotonic() - self._front.last_request > self._config.linger_s

    def _say_ready(self, listener: socket.socket, isolation: tuple[str, ...]) -> None:
        if self._config.socket is not None:
            where = {"socket": self._config.socket}
        else:
            host, port = listener.getsockname()[:2]
            where = {"url": f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"}
        _say(
            sys.stderr,
            f"collimate-ray serve: {next(iter(where.values()))} tier={TIER} ({', '.join(isolation)}) "
            f"templates={','.join(TEMPLATES)} slots={self._config.slots} pid={os.getpid()}",
        )
        if self._config.json:
            _say(sys.stdout, json.dumps({**where, "pid": os.getpid()}))


def _say(stream: object, line: str) -> None:
    with contextlib.suppress(OSError, ValueError, AttributeError):  # started detached, with nobody to read it
        stream.write(line + "\n")  # type: ignore[attr-defined]
        stream.flush()  # type: ignore[attr-defined]


def _prepare_process() -> None:
    """Be unreadable for execs, adopt their orphans, and undo what a parent such as Ray lowered."""
    jail.harden_keeper()
    jail.become_subreaper()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with contextlib.suppress(OSError):  # health tells what could not be put back
        if os.getpriority(os.PRIO_PROCESS, 0) > 0:
            os.setpriority(os.PRIO_PROCESS, 0, 0)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("0")


def _check_private(path: Path) -> None:
    found = path.stat()
    if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise ConfigError(
            f"socket: expected a directory of its own (mode 0700, or not there yet), "
            f"found {path} with mode {stat.S_IMODE(found.st_mode):04o} of uid {found.st_uid}"
        )


def _bind_unix(path: Path) -> socket.socket:
    if path.exists() and not path.is_socket():
        raise ConfigError(f"socket: expected a socket or nothing at {path}, found something else")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if _answers(path):
            raise ConfigError(f"socket: already served: another process listens at {path}")
        path.unlink(missing_ok=True)
        listener.bind(os.fspath(path))
        path.chmod(0o600)
    except OSError as error:
        listener.close()
        raise ConfigError(f"socket: {path} can't be bound: {error.strerror}") from error
    except ConfigError:
        listener.close()
        raise
    return listener


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(os.fspath(path))
        except OSError:
            return False
    return True


def _bind_tcp(host: str, port: int) -> socket.socket:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(found[0], socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(found[4])
    except OSError as error:
        raise ConfigError(f"port: {host}:{port} can't be bound: {error.strerror}") from error
    return listener
