"""Parked sessions of one template: its zygotes, a pool ready to be taken, and what is forked when it is empty.

Must not know requests or admission. Source: notes/SANDBOX.md, sections 3 and 6 (a pool takes a quarter off
the latency).
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import logging
from collections import deque
from collections.abc import Callable
from typing import Any

from collimate_ray.daemon.cell import Cell
from collimate_ray.daemon.cgroups import Cgroups
from collimate_ray.daemon.home import Home, remove_tree
from collimate_ray.daemon.outcome import BringupFailed
from collimate_ray.daemon.settings import MAX_SESSIONS
from collimate_ray.daemon.zygote import Zygote

_log = logging.getLogger(__name__)

#: Pause before a zygote that died is replaced, doubled while they go on dying, s.
_AGAIN_S, _AGAIN_MOST_S = 0.1, 10.0


class Slots:
    """Numbers of sessions: each live one has its own, and with it a uid and a cgroup."""

    def __init__(self) -> None:
        self._free = list(range(MAX_SESSIONS))

    def take(self) -> int:
        """Take the lowest free number.

        Raises:
            BringupFailed: All are in use.
        """
        if not self._free:
            raise BringupFailed(f"{MAX_SESSIONS} sessions live")
        return heapq.heappop(self._free)

    def give(self, slot: int) -> None:
        """Give a number back."""
        heapq.heappush(self._free, slot)


class _Pool:
    """Parked sessions of one kind, the number that there should be, and that of those to come."""

    def __init__(self, target: int) -> None:
        self.target, self.coming = target, 0
        self.cells: deque[Cell] = deque()


class Nursery:
    """Sessions of one template, ready to be taken.

    Args:
        name: The template's.
        make: Makes a zygote, not started, given what to call when it dies.
        home: The daemon's directory.
        slots: Shared by all templates.
        cgroups: Shared too, or None.
        zygotes: How many to keep, at least 1.
        parked: How many sessions for one exec to keep ready, at least 1.
        parked_sessions: The same, for several execs, where the zygotes make a difference.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[Callable[[Zygote], None]], Zygote],
        home: Home,
        slots: Slots,
        cgroups: Cgroups | None,
        *,
        zygotes: int,
        parked: int,
        parked_sessions: int,
    ) -> None:
        self.name = name
        self._make, self._home, self._slots, self._cgroups = make, home, slots, cgroups
        self._wanted = zygotes
        self.zygotes: list[Zygote] = []
        #: by whether they are for one exec only
        self._pools = {False: _Pool(parked)}
        self._parked_sessions = parked_sessions
        self._turn = itertools.count()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closing = False
        self._pause_s = _AGAIN_S
        self._names = itertools.count(1)
        #: what the first session said: whether it has a /proc
        self.facts: dict[str, Any] = {}
        #: what a fork of a zygote that only exits takes, ms
        self.bare_fork_ms = 0.0

    @property
    def parked(self) -> int:
        """Sessions that wait to be taken."""
        return sum(len(pool.cells) for pool in self._pools.values())

    @property
    def to_park(self) -> int:
        """How many there should be."""
        return sum(pool.target for pool in self._pools.values())

    async def start(self) -> None:
        """Start the first zygote; the others and the pool come by themselves.

        Raises:
            BringupFailed: It did not come up, or can't fork a session.
        """
        await self._add_zygote()
        if self.zygotes[0].ready.result()["once"]:
            self._pools = {True: self._pools[False], False: _Pool(self._parked_sessions)}
        for once, pool in self._pools.items():
            pool.cells.append(await self._fork(once))

    def fill(self) -> None:
        """Bring zygotes and pool to their numbers, beside other work."""
        if self._closing:
            return
        for _ in range(self._wanted - len(self.zygotes)):
            self._spawn(self._replace())
        self._refill()

    async def take(self, *, once: bool) -> Cell:
        """Take a parked session, or fork one.

        Args:
            once: It is for one exec of code.

        Raises:
            BringupFailed: None can be forked.
        """
        once = once and once in self._pools
        cells = self._pools[once].cells
        try:
            while cells:
                cell = cells.popleft()
                if not cell.gone:
                    return cell
                self.retire(cell)
            return await self._fork(once)
        finally:
            self._refill()

    def retire(self, cell: Cell) -> None:
        """End a session beside other work; its number is free when nothing of it lives."""
        self._spawn(self._end(cell))

    async def close(self) -> None:
        """End everything."""
        self._closing = True
        for pool in self._pools.values():
            self._retire_all(pool, list(pool.cells))
        while self._tasks:
            await asyncio.wait(self._tasks)
        for zygote in self.zygotes:
            zygote.close()

    def _retire_all(self, pool: _Pool, cells: list[Cell]) -> None:
        for cell in cells:
            pool.cells.remove(cell)
            self.retire(cell)

    async def _add_zygote(self) -> None:
        zygote = self._make(self._on_lost)
        await zygote.start()
        if self._closing:
            zygote.close()
            return
        self.zygotes.append(zygote)
        self.bare_fork_ms = zygote.ready.result()["bare_fork_ms"]
        self._pause_s = _AGAIN_S

    def _on_lost(self, zygote: Zygote) -> None:
        if zygote not in self.zygotes:
            return
        self.zygotes.remove(zygote)
        _log.warning("template=%s zygote=%d died: %s; replaced", self.name, zygote.pid, zygote.tail())
        for pool in self._pools.values():
            self._retire_all(pool, [cell for cell in pool.cells if cell.zygote is zygote])
        if not self._closing:
            self._spawn(self._replace())

    async def _replace(self) -> None:
        """Add one zygote, for one that is not there: several may be lost, and come, at a time."""
        while not self._closing:
            try:
                await self._add_zygote()
                break
            except BringupFailed as error:
                _log.error("template=%s no new zygote: %s; tried again in %g s", self.name, error, self._pause_s)
                await asyncio.sleep(self._pause_s)
                self._pause_s = min(_AGAIN_MOST_S, 2 * self._pause_s)
        self._refill()

    def _refill(self) -> None:
        if self._closing or not self.zygotes:  # the next zygote refills it
            return
        for once, pool in self._pools.items():
            for _ in range(pool.target - len(pool.cells) - pool.coming):
                pool.coming += 1
                self._spawn(self._park(once, pool))

    async def _park(self, once: bool, pool: _Pool) -> None:
        try:
            cell = await self._fork(once)
        except BringupFailed as error:
            _log.warning("template=%s no session parked: %s", self.name, error)
            return
        finally:
            pool.coming -= 1
        pool.cells.append(cell)

    async def _fork(self, once: bool) -> Cell:
        if not self.zygotes:
            raise BringupFailed("its zygote died, the next is not warm yet")
        zygote = self.zygotes[next(self._turn) % len(self.zygotes)]
        slot = self._slots.take()
        cell: Cell | None = None
        try:
            cell = self._make_cell(zygote, slot, once)
            await cell.open()
        except (BringupFailed, asyncio.CancelledError):
            if cell is None:
                self._slots.give(slot)
            else:
                self.retire(cell)
            raise
        self.facts = self.facts or cell.parked.result()
        return cell

    def _make_cell(self, zygote: Zygote, slot: int, once: bool) -> Cell:
        uid = self._home.uid_of(slot)
        try:
            place = None if self._home.namespaces else self._home.make_place(f"s{next(self._names)}-{slot}", uid)
        except OSError as error:
            raise BringupFailed(f"the session's directory can't be made: {error.strerror}") from error
        return Cell(zygote, slot, uid, place, self._cgroups.group(slot) if self._cgroups else None, once=once)

    async def _end(self, cell: Cell) -> None:
        await cell.close()
        if cell.place is not None:
            loop = asyncio.get_running_loop()
            with contextlib.suppress(OSError):  # what is left goes at exit or at the next start
                await loop.run_in_executor(None, remove_tree, self._home.retire(cell.place))
        self._slots.give(cell.slot)

    def _spawn(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and isinstance(task.exception(), BringupFailed):
            _log.warning("template=%s %s", self.name, task.exception())
