"""Who may run: slots and memory, a bounded queue before them, and what is said to those who can't be let in.

First come, first served, with two exceptions, so that many small execs are not stuck behind few big ones: an exec that
runs for long stops occupying a slot, and one that waits for much memory is passed by so many smaller ones and no more.
Must not run anything. Source: design/WIRE.md (errors) and DESIGN.md ("Back-pressure").
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass

from collimate_ray.sandbox.wire import STATUS_OF, ErrorCode

#: Waiting execs a slot, but not fewer than a client's usual two dozen in flight, twice; more are told ``at_capacity``.
_WAITERS_A_SLOT, _LEAST_WAITERS = 4, 48
#: The longest an exec waits for a slot, s. It bounds, too, how long one that waits for much memory holds others up.
_WAIT_S = 10.0
#: After so long an exec counts as a long one and gives its slot up, s: hundreds of times an ordinary grade.
LONG_S = 2.0
#: Execs a slot that may pass one whose memory is not free yet.
_PASSES_A_SLOT = 4


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


@dataclass(eq=False)
class Ticket:
    """The right to run of one exec, to be given back to ``Gate.leave``.

    Attributes:
        memory_mib: What it may use, MiB.
        is_long: It runs for so long that it occupies no slot any more.
        timer: Rings when it has run for long.
    """

    memory_mib: int
    is_long: bool = False
    timer: asyncio.TimerHandle | None = None


class Gate:
    """Lets in as many execs as slots and memory allow.

    Args:
        slots: Execs at a time, and as many long ones beside them.
        memory_mib: Sum of their memory limits, MiB.
        long_s: When an exec counts as a long one, s.
    """

    def __init__(self, slots: int, memory_mib: int, long_s: float = LONG_S) -> None:
        self.slots, self.memory_mib = slots, memory_mib
        self.draining = False
        #: the daemon ends when it is quiet: no way back
        self.ending = False
        self._long_s = long_s
        self._occupied = self._long = self._used_mib = 0
        #: ran for long while too many long ones ran already; they still occupy slots
        self._overdue: OrderedDict[Ticket, None] = OrderedDict()
        self._queue: OrderedDict[Ticket, asyncio.Future[None]] = OrderedDict()
        #: the first in the queue whose memory was not free, and how many may pass it still
        self._big: tuple[Ticket, asyncio.Future[None]] | None = None
        self._passes = 0

    @property
    def inside(self) -> int:
        """How many run, or are about to."""
        return self._occupied + self._long

    @property
    def queued(self) -> int:
        """How many wait."""
        return len(self._queue) + (self._big is not None)

    @property
    def has_room(self) -> bool:
        """Whether one more may at least wait."""
        return self.queued < max(_WAITERS_A_SLOT * self.slots, _LEAST_WAITERS)

    def check_open(self) -> None:
        """Refuse if no new work is taken.

        Raises:
            Refusal: ``draining``.
        """
        if self.draining:
            raise _draining()

    async def enter(self, memory_mib: int) -> Ticket:
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
        ticket = Ticket(memory_mib)
        if not self.queued and self._fits(ticket):
            self._take(ticket)
            return ticket
        if not self.has_room:
            raise _full(f"{self.inside} execs run and {self.queued} wait")
        await self._wait(ticket)
        return ticket

    async def _wait(self, ticket: Ticket) -> None:
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[None] = loop.create_future()
        self._queue[ticket] = turn
        timer = loop.call_later(_WAIT_S, _refuse, turn, _full(f"no slot within {_WAIT_S:g} s"))
        self._admit()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self.leave(ticket)  # its turn came in the same moment
            raise
        finally:
            timer.cancel()
            self._forget(ticket)

    def _forget(self, ticket: Ticket) -> None:
        """See that a ticket waits no more: whoever stood behind it may be next."""
        if self._big is not None and self._big[0] is ticket:
            self._big = None
        elif self._queue.pop(ticket, None) is None:
            return
        self._admit()

    def leave(self, ticket: Ticket) -> None:
        """Give the room back."""
        if ticket.timer is not None:
            ticket.timer.cancel()
        self._used_mib -= ticket.memory_mib
        if ticket.is_long:
            self._long -= 1
            if self._overdue:
                self._become_long(self._overdue.popitem(last=False)[0])
        else:
            self._occupied -= 1
            self._overdue.pop(ticket, None)
        self._admit()

    def drain(self, *, for_good: bool = False) -> None:
        """Take no new work: who waits is refused too, nothing of theirs has run."""
        self.draining = True
        self.ending = self.ending or for_good
        for turn in [*self._queue.values(), *([self._big[1]] if self._big else [])]:
            _refuse(turn, _draining())

    def undrain(self) -> None:
        """Take work again.

        Raises:
            Refusal: ``draining``: the daemon ends.
        """
        if self.ending:
            raise Refusal(ErrorCode.DRAINING, "draining: this daemon ends when what runs has ended")
        self.draining = False

    def _fits(self, ticket: Ticket) -> bool:
        return self._occupied < self.slots and self._used_mib + ticket.memory_mib <= self.memory_mib

    def _take(self, ticket: Ticket) -> None:
        self._occupied += 1
        self._used_mib += ticket.memory_mib
        ticket.timer = asyncio.get_running_loop().call_later(self._long_s, self._on_long, ticket)

    def _on_long(self, ticket: Ticket) -> None:
        if self._long < self.slots:
            self._become_long(ticket)
            self._admit()
        else:
            self._overdue[ticket] = None

    def _become_long(self, ticket: Ticket) -> None:
        ticket.is_long = True
        self._occupied -= 1
        self._long += 1

    def _admit(self) -> None:
        """Let in whoever can be let in: two candidates at most are looked at for each."""
        while self._occupied < self.slots and (found := self._next()) is not None:
            ticket, turn = found
            if not turn.done():
                self._take(ticket)
                turn.set_result(None)

    def _next(self) -> tuple[Ticket, asyncio.Future[None]] | None:
        """Take the next out of the queue, or None if nobody may enter now."""
        if self._big is not None and self._fits(self._big[0]):
            found, self._big = self._big, None
            return found
        if not self._queue or (self._big is not None and not self._passes):
            return None
        ticket, turn = next(iter(self._queue.items()))
        if self._fits(ticket):
            self._passes -= self._big is not None
            del self._queue[ticket]
            return ticket, turn
        if self._big is not None:
            return None
        self._big, self._passes = self._queue.popitem(last=False), _PASSES_A_SLOT * self.slots
        return self._next()


def _full(detail: str) -> Refusal:
    return Refusal(ErrorCode.AT_CAPACITY, f"at capacity: {detail}")


def _draining() -> Refusal:
    return Refusal(ErrorCode.DRAINING, "draining: this daemon takes no new work")


def _refuse(turn: asyncio.Future[None], refusal: Refusal) -> None:
    if not turn.done():
        turn.set_exception(refusal)
