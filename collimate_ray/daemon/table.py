"""The daemon's state: sessions, owners' leases, running execs. Runs execs in sessions, reaps what nobody wants.

Must not know HTTP or JSON. Source: design/WIRE.md (routes, errors, owner, cancel).
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import logging
import secrets
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from collimate_ray.daemon.admission import Gate, Refusal
from collimate_ray.daemon.execution import Execution, finish
from collimate_ray.daemon.home import Home, Place, remove_tree
from collimate_ray.daemon.outcome import BringupFailed, ExecRequest, Outcome
from collimate_ray.daemon.processes import Family
from collimate_ray.daemon.settings import MAX_SESSIONS, DaemonConfig
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
        slot: Its number in the range of uids.
        uid: Its own uid, or None.
        place: Its directories.
        lock: Held by the exec that runs: execs of a session run one after the other.
        running: The exec that runs, or None.
    """

    session_id: str
    template_id: str
    owner: str | None
    slot: int
    uid: int | None
    place: Place
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
        home: Its directory, with the mode set.
        keep: Directories that execs must be able to read.
    """

    def __init__(self, config: DaemonConfig, home: Home, keep: list[str]) -> None:
        self.config = config
        self.gate = Gate(config.slots, config.memory_mib)
        self.family = Family(home.is_session_uid)
        self.sessions: dict[str, Session] = {}
        self.execs: dict[str, Execution] = {}
        #: owner to the monotonic time at which its lease runs out
        self.owners: dict[str, float] = {}
        self._home, self._keep = home, keep
        self._gone: deque[str] = deque(maxlen=_GONE_KEPT)
        self._free_slots = list(range(MAX_SESSIONS))
        self._numbers = itertools.count(1)
        self._claimed: dict[str, asyncio.Task[Any] | None] = {}
        self._removals: set[asyncio.Future[None]] = set()

    # sessions

    def create(self, template_id: str, owner: str | None, *, once: bool = False) -> Session:
        """Make a session; ``once``: for one exec, not listed.

        Raises:
            Refusal: ``draining``, ``at_capacity`` or ``session_bringup_failed``.
        """
        self.gate.check_open()
        if not self._free_slots:
            raise Refusal(ErrorCode.AT_CAPACITY, f"at capacity: {MAX_SESSIONS} sessions live")
        name = f"{_ONCE if once else 'sess_'}{secrets.token_hex(8)}"
        slot = heapq.heappop(self._free_slots)
        uid = self._home.first_uid + slot if self._home.own_uids else None
        try:
            place = self._home.make_place(name, uid)
        except OSError as error:
            heapq.heappush(self._free_slots, slot)
            message = f"the session's directory can't be made: {error.strerror}"
            raise Refusal(ErrorCode.SESSION_BRINGUP_FAILED, message) from error
        session = Session(name, template_id, owner, slot, uid, place)
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
        """End a session: its exec is stopped, its directories go. False if somebody else did."""
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
        loop = asyncio.get_running_loop()
        removal = loop.run_in_executor(None, _remove, self._home, session.place)
        self._removals.add(removal)
        removal.add_done_callback(self._removals.discard)
        removal.add_done_callback(lambda _: heapq.heappush(self._free_slots, session.slot))

    # execs

    async def run_in(self, session: Session, request: ExecRequest) -> Outcome:
        """Run an exec in a session.

        Raises:
            Refusal: See ``Gate.enter``; ``session_gone`` if the session ended meanwhile; ``session_bringup_failed``.
        """
        with self._claim(request.exec_id):
            async with session.lock:
                return await self._run_locked(session, request)

    async def _run_locked(self, session: Session, request: ExecRequest) -> Outcome:
        await self.gate.enter(request.memory_mib)
        try:
            self.find(session.session_id)  # it may have ended while this waited
            return await self._run(session, request)
        finally:
            session.used = time.monotonic()
            self.gate.leave(request.memory_mib)

    async def run_once(self, template_id: str, owner: str | None, request: ExecRequest) -> Outcome:
        """Make a session, run an exec in it, and end it.

        Raises:
            Refusal: See ``create`` and ``run_in``.
        """
        with self._claim(request.exec_id):
            await self.gate.enter(request.memory_mib)
            try:
                return await self._run_and_end(self.create(template_id, owner, once=True), request)
            finally:
                self.gate.leave(request.memory_mib)

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
        mark = f"{self._home.digest}.{next(self._numbers)}"
        place, uid = session.place, session.uid
        execution = Execution(request, self._home, place, uid, mark, self._keep, self.family)
        self.execs[request.exec_id] = session.running = execution
        session.exec_count += 1
        try:
            return await finish(execution)
        except BringupFailed as error:
            raise Refusal(ErrorCode.SESSION_BRINGUP_FAILED, str(error)) from error
        finally:
            session.running = None
            del self.execs[request.exec_id]

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

    def on_child(self) -> None:
        """Look which execs ended (SIGCHLD)."""
        for execution in list(self.execs.values()):
            execution.on_exit()

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
        if self._removals:
            await asyncio.wait(self._removals)


def _remove(home: Home, place: Place) -> None:
    with contextlib.suppress(OSError):  # what is left goes at exit or at the next start
        remove_tree(home.retire(place))
