"""Who may run: slots and memory, a bounded queue before them, and what is said to those who can't be let in.

Must not run anything. Source: design/WIRE.md (errors) and DESIGN.md ("Back-pressure").
"""

from __future__ import annotations

import asyncio
from collections import deque

from collimate_ray.sandbox.wire import STATUS_OF, ErrorCode

#: Waiting execs a slot; more are told ``at_capacity``.
_WAITERS_A_SLOT = 4
#: The longest an exec waits for a slot, s.
_WAIT_S = 10.0


class Refusal(Exception):
    """A request is refused; becomes an error body.

    Args:
        code: ``error_code`` of the wire.
        message: One line for people.
        status: HTTP status; the wire's own for the code by default.
    """

    def __init__(self, code: str, message: str, status: int | None = None) -> None:
        super().__init__(code, message, status)
        self.code, self.message = code, message
        self.status = STATUS_OF[code] if status is None else status


class Gate:
    """Lets in as many execs as slots and memory allow, first come first served.

    Args:
        slots: Execs at a time.
        memory_mib: Sum of their memory limits, MiB.
    """

    def __init__(self, slots: int, memory_mib: int) -> None:
        self.slots, self.memory_mib = slots, memory_mib
        self.draining = False
        self.inside = 0
        self._used_mib = 0
        self._queue: deque[tuple[asyncio.Future[None], int]] = deque()

    @property
    def queued(self) -> int:
        """How many wait."""
        return len(self._queue)

    def check_open(self) -> None:
        """Refuse if no new work is taken.

        Raises:
            Refusal: ``draining``.
        """
        if self.draining:
            raise Refusal(ErrorCode.DRAINING, "draining: this daemon takes no new work")

    async def enter(self, memory_mib: int) -> None:
        """Wait until there is room, and take it; ``leave`` must follow.

        Raises:
            Refusal: ``draining``; ``at_capacity``; ``bad_request`` if it can never fit.
        """
        self.check_open()
        if memory_mib > self.memory_mib:
            raise Refusal(
                ErrorCode.BAD_REQUEST,
                f"limits.memory_mib: expected at most {self.memory_mib} (all of this daemon's), found {memory_mib}",
            )
        if not self._queue and self._fits(memory_mib):
            self._take(memory_mib)
            return
        if len(self._queue) >= _WAITERS_A_SLOT * self.slots:
            raise _full(f"{self.inside} execs run and {len(self._queue)} wait")
        await self._wait(memory_mib)

    async def _wait(self, memory_mib: int) -> None:
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[None] = loop.create_future()
        entry = (turn, memory_mib)
        self._queue.append(entry)
        timer = loop.call_later(_WAIT_S, _refuse, turn, _full(f"no slot within {_WAIT_S:g} s"))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self.leave(memory_mib)  # its turn came in the same moment
            raise
        finally:
            timer.cancel()
            if entry in self._queue:
                self._queue.remove(entry)
                self._admit()

    def leave(self, memory_mib: int) -> None:
        """Give the room back."""
        self.inside -= 1
        self._used_mib -= memory_mib
        self._admit()

    def drain(self) -> None:
        """Take no new work: who waits is refused too, nothing of theirs has run."""
        self.draining = True
        for turn, _ in list(self._queue):
            _refuse(turn, Refusal(ErrorCode.DRAINING, "draining: this daemon takes no new work"))

    def _fits(self, memory_mib: int) -> bool:
        return self.inside < self.slots and self._used_mib + memory_mib <= self.memory_mib

    def _take(self, memory_mib: int) -> None:
        self.inside += 1
        self._used_mib += memory_mib

    def _admit(self) -> None:
        while self._queue and self._fits(self._queue[0][1]):
            turn, memory_mib = self._queue.popleft()
            if not turn.done():
                self._take(memory_mib)
                turn.set_result(None)


def _full(detail: str) -> Refusal:
    return Refusal(ErrorCode.AT_CAPACITY, f"at capacity: {detail}")


def _refuse(turn: asyncio.Future[None], refusal: Refusal) -> None:
    if not turn.done():
        turn.set_exception(refusal)
