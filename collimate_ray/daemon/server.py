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
from dataclasses import replace
from pathlib import Path

from collimate_ray.config import runtime_dir
from collimate_ray.daemon import logs
from collimate_ray.daemon.cgroups import Cgroups, CgroupsUnusable
from collimate_ray.daemon.home import Home
from collimate_ray.daemon.http import Front
from collimate_ray.daemon.isolation import Fence, choose_fence
from collimate_ray.daemon.processes import kill_leftovers
from collimate_ray.daemon.routes import Routes
from collimate_ray.daemon.settings import DaemonConfig
from collimate_ray.daemon.table import Table
from collimate_ray.daemon.templates import load_templates
from collimate_ray.daemon.warm import Warm, trial_zygote
from collimate_ray.errors import ConfigError
from collimate_ray.jail import process as jail
from collimate_ray.sandbox.wire import MAX_SOCKET_PATH_BYTES, TIERS
from collimate_ray.spec import RUNNER_VERSION

_log = logging.getLogger(__name__)

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
    logs.to_stderr(config.verbose)
    return asyncio.run(_Daemon(config).run())


class _Daemon:
    def __init__(self, config: DaemonConfig) -> None:
        self._config = config
        self._made_dir: Path | None = None
        self._cgroups: Cgroups | None = None

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
        templates = load_templates(self._config.templates)
        if killed := kill_leftovers(home.digest, home.in_uid_range):
            _log.warning("killed %d processes that an earlier daemon left", killed)
        fence = await choose_fence(
            home,
            trial_zygote(home),
            tier=self._config.tier,
            allow_unsafe=self._config.allow_unsafe,
            max_abi=self._config.max_landlock_abi,
        )
        self._check_tier(fence)
        fence = self._open_cgroups(home, fence)
        warm = Warm(templates, home, fence, self._cgroups, self._config.slots)
        try:
            return await self._serve(listener, home, fence, warm)
        finally:
            await warm.close()
            if self._cgroups is not None:
                self._cgroups.close()

    def _check_tier(self, fence: Fence) -> None:
        wanted = self._config.require_tier
        if wanted is not None and TIERS.index(fence.tier) < TIERS.index(wanted):
            why = "; ".join(f"{name}: {reason}" for name, reason in fence.missing.items())
            raise ConfigError(f"require_tier: expected {wanted!r} or better, found {fence.tier!r} ({why})")

    def _open_cgroups(self, home: Home, fence: Fence) -> Fence:
        """Use cgroups where they can be used; give the fence that says so, or why not."""
        if not self._config.cgroups:
            return fence.without_cgroups("switched off")
        try:
            self._cgroups = Cgroups.open(home.digest)
        except CgroupsUnusable as error:
            return fence.without_cgroups(str(error))
        return replace(fence, cgroups=self._cgroups.parts)

    async def _serve(self, listener: socket.socket, home: Home, fence: Fence, warm: Warm) -> int:
        await warm.start()
        table = Table(self._config, warm)
        self._table = table
        admin = _bind_admin(home.root / "admin.sock")
        name = admin.getsockname() if admin else None
        self._front = Front(Routes(table, fence, RUNNER_VERSION, name).handle)
        self._handle_signals()
        servers = [await self._front.listen(listener)]
        if admin is not None:
            servers.append(await self._front.listen(admin, admin=True))
        self._say_ready(listener, fence, warm)
        ticker = asyncio.ensure_future(self._tick())
        code = await self._over
        ticker.cancel()
        for server in servers:
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

    def _handle_signals(self) -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._drain)

    def _drain(self) -> None:
        if self._table.gate.ending:
            self._end(_INTERRUPTED)
            return
        _log.info("draining: %d execs run", len(self._table.execs))
        self._table.gate.drain(for_good=True)
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
                self._table.gate.drain(for_good=True)
                self._end(0)

    def _may_leave(self) -> bool:
        if self._config.linger_s is None or self._front.busy or self._table.execs or self._table.owners:
            return False
        return time.monotonic() - self._front.last_request > self._config.linger_s

    def _say_ready(self, listener: socket.socket, fence: Fence, warm: Warm) -> None:
        if self._config.socket is not None:
            where = {"socket": self._config.socket}
        else:
            host, port = listener.getsockname()[:2]
            where = {"url": f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"}
        _say(
            sys.stderr,
            f"collimate-ray serve: {next(iter(where.values()))} tier={fence.tier} ({', '.join(fence.parts)}) "
            f"templates={','.join(warm.names)} slots={self._config.slots} pid={os.getpid()}",
        )
        if self._config.json:
            _say(sys.stdout, json.dumps({**where, "pid": os.getpid()}))


def _say(stream: object, line: str) -> None:
    with contextlib.suppress(OSError, ValueError, AttributeError):  # started detached, with nobody to read it
        stream.write(line + "\n")  # type: ignore[attr-defined]
        stream.flush()  # type: ignore[attr-defined]


def _prepare_process() -> None:
    """Be unreadable for execs, and undo what a parent such as Ray lowered."""
    jail.harden_keeper()
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


def _bind_admin(path: Path) -> socket.socket | None:
    """Make the admin socket; None where its path, longer than the served one's, is too long to be bound."""
    return _bind_unix(path) if len(os.fsencode(path)) <= MAX_SOCKET_PATH_BYTES else None


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
