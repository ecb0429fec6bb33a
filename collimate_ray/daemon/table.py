"""The daemon's state: sessions, owners' leases, running execs. Runs execs in sessions, reaps what nobody wants.

Must not know HTTP or JSON. Source: design/WIRE.md (routes, errors, owner, cancel).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from collimate_ray.daemon.admission import Gate, Refusal
from collimate_ray.daemon.cell import Cell
from collimate_ray.daemon.execution import Execution, finish
from collimate_ray.daemon.outcome import BringupFailed, CellLost, ExecRequest, Outcome
from collimate_ray.daemon.settings import DaemonConfig
from collimate_ray.daemon.templates import Template
from collimate_ray.daemon.warm import Warm
from collimate_ray.sandbox.wire import ErrorCode

_log = logging.getLogger(__name__)

#: Destroyed sessions are remembered as gone so many at a time; older ones count as never seen.
_GONE_KEPT = 4096
#: Names of the throw-away sessions of one-shot execs begin so.
_ONCE = "once_"


@dataclass
class Session:
    """One session. Times are monotonic seconds.

    Attributes:
        session_id: Its name on the wire.
        template_id: The template it was asked for.
        owner: Whose lease keeps it, or None.
        template: The template itself.
        cell: Its processes.
        fork_time_ms: What it took to get them, ms.
        lock: Held by the exec that runs: execs of a session run one after the other.
        running: The exec that runs, or None.
    """

    session_id: str
    template_id: str
    owner: str | None
    template: Template
    cell: Cell
    fork_time_ms: float = 0.0
    created: float = field(default_factory=time.monotonic)
    used: float = field(default_factory=time.monotonic)
    exec_count: int = 0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    running: Execution | None = None

    def info(self) -> dict[str, object]:
        """Give the wire's SessionInfo."""
        now = time.monotonic()
        return {
            "session_id": self.session_id,
            "template_id": self.template_id,
            "age_secs": round(now - self.created, 3),
            "idle_secs": 0.0 if self.running else round(now - self.used, 3),
            "exec_count": self.exec_count,
        }


class Table:
    """All sessions and execs of a daemon.

    Args:
        config: How to serve.
        warm: Sessions ready to be taken.
    """

    def __init__(self, config: DaemonConfig, warm: Warm) -> None:
        self.config, self.warm = config, warm
        self.gate = Gate(config.slots, config.memory_mib, config.long_s)
        self.sessions: dict[str, Session] = {}
        self.execs: dict[str, Execution] = {}
        #: owner to the monotonic time at which its lease runs out
        self.owners: dict[str, float] = {}
        self._gone: deque[str] = deque(maxlen=_GONE_KEPT)
        self._claimed: dict[str, asyncio.Task[Any] | None] = {}

    # sessions

    async def create(self, template_id: str, owner: str | None, *, only: ExecRequest | None = None) -> Session:
        """Make a session; ``only``: for this exec alone, not listed.

        Raises:
            Refusal: ``draining`` or ``session_bringup_failed``.
        """
        self.gate.check_open()
        started = time.monotonic()
        name = f"{_ONCE if only else 'sess_'}{secrets.token_hex(8)}"
        nursery, template = self.warm.nursery(template_id), self.warm.template(template_id)
        try:
            cell = await nursery.take(once=only is not None and only.kind != "command" and not template.command)
        except BringupFailed as error:
            raise Refusal(ErrorCode.SESSION_BRINGUP_FAILED, str(error)) from error
        cell.is_last = only is not None
        spent_ms = round((time.monotonic() - started) * 1e3, 3)
        session = Session(name, template_id, owner, template, cell, spent_ms)
        self.sessions[name] = session
        return session

    def listed(self) -> list[Session]:
        """Give the sessions that somebody made and must end."""
        return [session for name, session in self.sessions.items() if not name.startswith(_ONCE)]

    def find(self, session_id: str) -> Session:
        """Give a live session.

        Raises:
            Refusal: ``session_gone`` if it was destroyed, ``no_such_session`` if it was reaped or never there.
        """
        session = self.sessions.get(session_id)
        if session is not None:
            return session
        if session_id in self._gone:
            raise Refusal(ErrorCode.SESSION_GONE, f"session gone: {session_id}")
        raise Refusal(ErrorCode.NO_SUCH_SESSION, f"no such session: {session_id}")

    async def destroy(self, session: Session, *, reaped: bool = False) -> bool:
        """End a session: its exec is stopped, its files go. False if somebody else did."""
        if self.sessions.pop(session.session_id, None) is None:
            return False
        if not reaped:
            self._gone.append(session.session_id)
        if session.running is not None:
            session.running.stop("cancelled")
        async with session.lock:
            self._retire(session)
        return True

    def _retire(self, session: Session) -> None:
        self.warm.nursery(session.template_id).retire(session.cell)

    # execs

    async def run_in(self, session: Session, request: ExecRequest) -> Outcome:
        """Run an exec in a session.

        Raises:
            Refusal: See ``Gate.enter``; ``session_gone`` if the session ended meanwhile; ``session_bringup_failed``.
        """
        request = replace(request, template_limits=session.template.exec_limits)
        with self._claim(request.exec_id):
            async with session.lock:
                return await self._run_locked(session, request)

    async def _run_locked(self, session: Session, request: ExecRequest) -> Outcome:
        ticket = await self.gate.enter(request.memory_mib)
        try:
            self.find(session.session_id)  # it may have ended while this waited
            return await self._run(session, request)
        finally:
            session.used = time.monotonic()
            self.gate.leave(ticket)

    async def run_once(self, template_id: str, owner: str | None, request: ExecRequest) -> Outcome:
        """Make a session, run an exec in it, and end it.

        Raises:
            Refusal: See ``create`` and ``run_in``.
        """
        request = replace(request, template_limits=self.warm.template(template_id).exec_limits)
        with self._claim(request.exec_id):
            ticket = await self.gate.enter(request.memory_mib)
            try:
                return await self._run_and_end(await self.create(template_id, owner, only=request), request)
            finally:
                self.gate.leave(ticket)

    async def _run_and_end(self, session: Session, request: ExecRequest) -> Outcome:
        try:
            async with session.lock:
                return await self._run(session, request)
        finally:
            if self.sessions.pop(session.session_id, None) is not None:
                self._retire(session)

    @contextlib.contextmanager
    def _claim(self, exec_id: str) -> Iterator[None]:
        """Hold an exec's id while it waits and runs, so that it can be cancelled by it."""
        self.gate.check_open()
        if exec_id in self._claimed:
            raise Refusal(ErrorCode.BAD_REQUEST, f"id: expected one that is not running, found {exec_id!r}")
        self._claimed[exec_id] = asyncio.current_task()
        try:
            yield
        finally:
            del self._claimed[exec_id]

    async def _run(self, session: Session, request: ExecRequest) -> Outcome:
        execution = Execution(request, session.cell, session.template.command or ())
        self.execs[request.exec_id] = session.running = execution
        session.exec_count += 1
        try:
            return await finish(execution)
        except BringupFailed as error:
            raise Refusal(ErrorCode.SESSION_BRINGUP_FAILED, str(error)) from error
        except CellLost as error:
            await self._lost(session)
            if error.with_zygote:
                raise Refusal(ErrorCode.ZYGOTE_LOST, f"the exec's host died under it: {error.message}") from error
            raise Refusal(ErrorCode.SESSION_GONE, f"session gone: {error.message}") from error
        finally:
            session.running = None
            del self.execs[request.exec_id]

    async def _lost(self, session: Session) -> None:
        """Forget a session whose processes are gone."""
        if self.sessions.pop(session.session_id, None) is not None:
            self._gone.append(session.session_id)
            self._retire(session)

    def cancel(self, exec_id: str) -> None:
        """Stop a running exec.

        Raises:
            Refusal: ``no_such_exec``.
        """
        task = self._claimed.get(exec_id)
        if task is None:
            raise Refusal(ErrorCode.NO_SUCH_EXEC, f"no such exec: {exec_id}")
        if exec_id in self.execs:
            self.execs[exec_id].stop("cancelled")
        else:
            task.cancel()  # it waits still

    # owners

    def renew(self, owner: str, ttl_s: float) -> None:
        """Give or renew an owner's lease."""
        self.owners[owner] = time.monotonic() + ttl_s

    async def drop_owner(self, owner: str) -> int:
        """End an owner's lease and its sessions; give how many those were."""
        self.owners.pop(owner, None)
        owned = [session for session in self.sessions.values() if session.owner == owner]
        return sum(await asyncio.gather(*(self.destroy(session, reaped=True) for session in owned)))

    async def reap(self) -> None:
        """End sessions that were idle too long and those of silent owners."""
        now = time.monotonic()
        for owner in [owner for owner, until in self.owners.items() if until < now]:
            _log.info("owner %s is silent: %d sessions end", owner, await self.drop_owner(owner))
        for session in list(self.sessions.values()):
            if not session.lock.locked() and not session.running and now - session.used > self.config.idle_s:
                _log.info("session %s was idle for %g s: reaped", session.session_id, self.config.idle_s)
                await self.destroy(session, reaped=True)

    # the end

    async def close(self) -> None:
        """Stop every exec, end every session, wait for the removals."""
        for execution in list(self.execs.values()):
            execution.stop("cancelled")
        await asyncio.gather(*(self.destroy(session) for session in list(self.sessions.values())))
        while self.execs:
            await asyncio.sleep(0.005)
