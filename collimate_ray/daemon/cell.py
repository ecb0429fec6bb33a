"""One session's processes as the daemon sees them: parked, busy with an exec, or gone.

Must not know of requests' contents, HTTP or admission. Source: design/WIRE.md (sessions).
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import time
from collections.abc import Sequence
from typing import Any

from collimate_ray.daemon.cgroups import Group
from collimate_ray.daemon.home import Place
from collimate_ray.daemon.outcome import BringupFailed, CellLost
from collimate_ray.daemon.zygote import Forked, Zygote
from collimate_ray.jail import kernel
from collimate_ray.jail.session import AGAIN, STOP

_log = logging.getLogger(__name__)

#: The longest that a session may take to park, s: a fork and some mounts, on a machine that is loaded many times over.
_PARK_S = 60.0


class Cell:
    """A session's processes.

    Args:
        zygote: Whose child it is.
        slot: Its number in the range of uids.
        uid: Its own uid, or None.
        place: Its directories, where it has no file system of its own.
        group: Its cgroup, or None.
        once: It gets one exec, whose process is there already, beside an idle first one.
    """

    def __init__(
        self,
        zygote: Zygote,
        slot: int,
        uid: int | None,
        place: Place | None,
        group: Group | None,
        *,
        once: bool = False,
    ) -> None:
        self.zygote, self.slot, self.uid, self.place, self.group = zygote, slot, uid, place, group
        self.once = once
        self._loop = asyncio.get_running_loop()
        self.parked: asyncio.Future[dict[str, Any]] = self._loop.create_future()
        self.began: asyncio.Future[dict[str, Any]] = self._loop.create_future()
        self.ended: asyncio.Future[dict[str, Any]] = self._loop.create_future()
        self.began_at = 0.0
        self.gone = False
        #: nobody asks it for another exec
        self.is_last = False
        #: an exec of it was told to end: the word may arrive after that exec's end
        self.was_stopped = False
        self._forked: Forked | None = None
        self._number = 0
        self._busy = False

    @property
    def pid(self) -> int:
        """The session's first process, or its only exec's."""
        return self._forked.pid if self._forked else 0

    @property
    def fork_ms(self) -> float:
        """How long its fork took the zygote, ms."""
        return self._forked.fork_ms if self._forked else 0.0

    async def open(self) -> None:
        """Fork it, and wait until it is parked.

        Raises:
            BringupFailed: It could not be forked or fenced in.
        """
        self._sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._sock.setblocking(False)
        order: dict[str, Any] = {"uid": self.uid, "work": None, "tmp": None, "once": self.once}
        if self.place is not None:
            order.update(work=str(self.place.work), tmp=str(self.place.tmp))
        joins = self.group.join_fds if self.group else []
        try:
            self._number, self._forked = await self.zygote.fork(order, [theirs.fileno(), *joins])
        except BringupFailed:
            self._sock.close()
            self.gone = True
            raise
        finally:
            theirs.close()
        self._loop.add_reader(self._sock, self._on_message)
        if self.once:
            self.zygote.when_ended(self._number, self._on_ended, self._lose)
        try:
            await asyncio.wait_for(asyncio.shield(self.parked), _PARK_S)
        except (CellLost, asyncio.TimeoutError) as error:
            self.kill()
            raise BringupFailed(f"a session did not come up: {self.zygote.tail()}") from error

    def begin(self, header: dict[str, Any], fds: Sequence[int]) -> None:
        """Give it an exec; ``began`` and ``ended`` tell of it.

        Raises:
            CellLost: It is gone.
        """
        self._busy = True
        self.began, self.ended = self._loop.create_future(), self._loop.create_future()
        if self.gone:
            raise self._loss()
        try:
            kernel.send(self._sock, header, fds)
        except OSError:
            raise self._loss() from None

    def stop(self) -> None:
        """End the exec that runs; the session lives on if there may be another."""
        self.was_stopped = True
        self._signal(signal.SIGKILL if self.once else STOP)

    def kill(self) -> None:
        """End the session and all that is in it."""
        self._signal(signal.SIGKILL)

    async def close(self) -> None:
        """End it, and wait until nothing of it lives."""
        self.kill()
        if self._number:
            await self.zygote.ended(self._number)
        self._lose()
        if self._forked:
            os.close(self._forked.pidfd)
            self._forked = None

    def _signal(self, number: int) -> None:
        if self._forked is None:
            return
        try:
            signal.pidfd_send_signal(self._forked.pidfd, number)
        except ProcessLookupError:
            return

    def _on_message(self) -> None:
        try:
            message, _ = kernel.receive(self._sock)
        except BlockingIOError:
            return
        except OSError:
            message = None
        if message is None and self.once:  # an exec keeps no line to the daemon; its end is the zygote's to tell
            self._loop.remove_reader(self._sock)
        elif message is None:
            self._lose()
        elif "parked" in message:
            _settle(self.parked, message)
        elif "began" in message:
            self.began_at = time.monotonic()
            _settle(self.began, message)
        else:
            self._on_ended(message)

    def _on_ended(self, message: dict[str, Any]) -> None:
        if not self.is_last and not self.once:
            self._signal(AGAIN)
        if self._busy:  # else it was a parked process that ended
            self._busy = False
            _settle(self.ended, message)

    def _loss(self) -> CellLost:
        return CellLost("the zygote died" if self.zygote.is_lost() else "the session died", self.zygote.is_lost())

    def _lose(self) -> None:
        if self.gone:
            return
        self.gone = True
        self._loop.remove_reader(self._sock)
        self._sock.close()
        for future in (self.parked, self.began, self.ended):
            if not future.done():
                future.set_exception(self._loss())
                future.exception()  # looked at: nobody may wait for it


def _settle(future: asyncio.Future[dict[str, Any]], message: dict[str, Any]) -> None:
    if not future.done():
        future.set_result(message)
