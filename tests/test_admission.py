"""The gate before the slots: what must hold whatever comes, on a clock of its own."""

import asyncio
import random
import selectors

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from collimate_ray.daemon import admission
from collimate_ray.daemon.admission import Gate, Refusal

SLOTS, MEMORY_MIB, LONG_S = 3, 100, 2.0


class FastClock(asyncio.SelectorEventLoop):
    """A loop whose clock jumps to the next timer when there is nothing else to do."""

    def __init__(self):
        super().__init__(selectors.SelectSelector())
        self.now = 0.0
        select = self._selector.select
        self._selector.select = lambda timeout: select(self._pass(timeout))

    def _pass(self, timeout):
        self.now += timeout or 0.0
        return 0

    def time(self):
        return self.now


def play(scene):
    loop = FastClock()
    try:
        return loop.run_until_complete(scene)
    finally:
        loop.close()


async def settle():
    for _ in range(5):
        await asyncio.sleep(0)


class Crowd:
    """Execs that want in, and the record of who came in when."""

    def __init__(self, gate):
        self.gate = gate
        self.inside = {}
        self.arrived, self.entered = {}, []

    def check(self):
        gate = self.gate
        assert set(self.inside) <= set(self.arrived)
        assert gate.inside >= len(self.inside)  # a turn that was given and not yet noticed counts
        assert 0 <= gate._occupied <= gate.slots
        assert 0 <= gate._long <= gate.slots
        assert sum(memory for memory in self.inside.values()) <= gate._used_mib <= gate.memory_mib
        assert len(gate._overdue) <= gate._occupied

    async def run(self, name, memory_mib, seconds):
        self.arrived[name] = memory_mib
        ticket = await self.gate.enter(memory_mib)
        try:
            self.entered.append(name)
            self.inside[name] = memory_mib
            self.check()
            await asyncio.sleep(seconds)
        finally:
            del self.inside[name]
            self.gate.leave(ticket)
            self.check()
        return "done"

    def is_empty(self):
        gate = self.gate
        return (gate._occupied, gate._long, gate._used_mib, gate.queued, len(gate._overdue)) == (0, 0, 0, 0, 0)


arrivals = st.lists(
    st.tuples(
        st.floats(0, 30, width=16),  # when it comes
        st.sampled_from([1, 1, 10, 30, 60, 100]),  # MiB
        st.sampled_from([0.0, 0.01, 0.5, 1.0, 3.0, 20.0]),  # how long it runs, s
        st.none() | st.floats(0, 15, width=16),  # when its client leaves
    ),
    max_size=60,
)


async def one(crowd, name, came, memory_mib, seconds, patience_s):
    await asyncio.sleep(came)
    try:
        return await asyncio.wait_for(crowd.run(name, memory_mib, seconds), patience_s)
    except asyncio.TimeoutError:
        return "left"
    except Refusal as refusal:
        return refusal.code


async def day(arrivals, drained_at=None):
    """Let all of them come, and give the crowd and how each ended."""
    gate = Gate(SLOTS, MEMORY_MIB, LONG_S)
    crowd = Crowd(gate)
    if drained_at is not None:
        asyncio.get_running_loop().call_later(drained_at, gate.drain)
    ends = await asyncio.gather(*(one(crowd, name, *arrival) for name, arrival in enumerate(arrivals)))
    await settle()
    assert crowd.is_empty()
    return crowd, ends


@given(arrivals, st.none() | st.floats(0, 30, width=16))
@settings(max_examples=300, deadline=None)
def test_never_more_than_there_is_and_nothing_leaks(arrivals, drained_at):
    _, ends = play(day(arrivals, drained_at))
    for end, (_, _, _, patience_s) in zip(ends, arrivals, strict=True):
        assert end in {"done", "left", "at_capacity", "draining"}
        assert patience_s is not None or end != "left"
        assert drained_at is not None or end != "draining"


@given(arrivals)
@settings(max_examples=200, deadline=None)
def test_first_come_first_served_but_for_so_many_passes(arrivals):
    """Nobody is passed more often than the passes allow, by anybody; those of equal memory, by nobody."""

    crowd, ends = play(day([(*arrival[:3], None) for arrival in arrivals]))
    arrived = [name for name in crowd.arrived if ends[name] == "done"]
    for name in crowd.entered:
        ahead = set(crowd.entered[: crowd.entered.index(name)])
        passed_it = [other for other in arrived[arrived.index(name) + 1 :] if other in ahead]
        assert len(passed_it) <= admission._PASSES_A_SLOT * SLOTS
        assert all(crowd.arrived[other] < crowd.arrived[name] for other in passed_it)


def test_a_big_one_is_not_starved_by_a_stream_of_small_ones():
    async def scene():
        gate = Gate(SLOTS, MEMORY_MIB, 1000.0)
        crowd = Crowd(gate)
        small = [asyncio.ensure_future(crowd.run(f"small {n}", 40, 0.1)) for n in range(2)]
        await settle()
        big = asyncio.ensure_future(crowd.run("big", 100, 0.1))
        await settle()
        small += [asyncio.ensure_future(crowd.run(f"later {n}", 40, 0.1)) for n in range(30)]
        await asyncio.gather(big, *small)
        passes = crowd.entered.index("big") - 2
        assert passes <= admission._PASSES_A_SLOT * SLOTS
        assert passes > 0  # and they did not all wait for it
        assert crowd.is_empty()

    play(scene())


def test_small_ones_are_not_stuck_behind_long_ones():
    async def scene():
        gate = Gate(SLOTS, MEMORY_MIB, LONG_S)
        crowd = Crowd(gate)
        loop = asyncio.get_running_loop()
        long = [asyncio.ensure_future(crowd.run(f"long {n}", 1, 500)) for n in range(SLOTS)]
        await settle()
        started = loop.time()
        await crowd.run("small", 1, 0.0)
        assert loop.time() - started <= LONG_S
        assert gate.inside == SLOTS
        more = [asyncio.ensure_future(crowd.run(f"more {n}", 1, 500)) for n in range(SLOTS)]
        await asyncio.sleep(LONG_S * 2)
        assert gate.inside == 2 * SLOTS
        with pytest.raises(Refusal, match="no slot within"):  # as many long ones as there are slots, and no more
            await crowd.run("unlucky", 1, 0.0)
        long[0].cancel()
        await settle()
        assert (gate._long, gate._occupied) == (SLOTS, SLOTS - 1)  # the oldest overdue one took its place
        await crowd.run("small again", 1, 0.0)
        for task in (*long, *more):
            task.cancel()
        await asyncio.gather(*long, *more, return_exceptions=True)
        assert crowd.is_empty()

    play(scene())


def test_the_queue_is_bounded():
    async def scene():
        gate = Gate(1, MEMORY_MIB, 1000.0)
        crowd = Crowd(gate)
        tasks = [asyncio.ensure_future(crowd.run("in", 1, 1000))]
        await settle()
        while gate.has_room:
            tasks.append(asyncio.ensure_future(crowd.run(f"waits {len(tasks)}", 1, 0)))
            await settle()
        assert gate.queued == max(admission._WAITERS_A_SLOT, admission._LEAST_WAITERS)
        with pytest.raises(Refusal, match="1 execs run and") as refusal:
            await gate.enter(1)
        assert (refusal.value.code, refusal.value.status) == ("at_capacity", 503)
        tasks[1].cancel()
        await settle()
        assert gate.has_room
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert crowd.is_empty()

    play(scene())


def test_what_can_never_fit_is_a_mistake():
    async def scene():
        gate = Gate(SLOTS, MEMORY_MIB)
        with pytest.raises(Refusal, match=r"limits\.memory_mib: expected at most 100 .*, found 101") as refusal:
            await gate.enter(101)
        assert refusal.value.code == "bad_request"
        gate.leave(await gate.enter(100))

    play(scene())


def test_drain_refuses_who_waits_and_lets_finish_who_runs():
    async def scene():
        gate = Gate(1, MEMORY_MIB)
        crowd = Crowd(gate)
        runs = asyncio.ensure_future(crowd.run("runs", 50, 1))
        await settle()
        big = asyncio.ensure_future(crowd.run("big", 100, 1))
        waits = [asyncio.ensure_future(crowd.run(f"waits {n}", 1, 1)) for n in range(5)]
        await settle()
        gate.drain()
        with pytest.raises(Refusal, match="draining"):
            await gate.enter(1)
        for task in (big, *waits):
            with pytest.raises(Refusal, match="draining"):
                await task
        assert gate.queued == 0
        assert await runs == "done"
        gate.undrain()
        assert await crowd.run("again", 1, 0) == "done"
        gate.drain(for_good=True)
        with pytest.raises(Refusal, match="ends"):
            gate.undrain()
        gate.drain()
        with pytest.raises(Refusal):
            gate.check_open()
        assert crowd.is_empty()

    play(scene())


def test_a_client_that_leaves_as_its_turn_comes_takes_no_room():
    async def scene():
        gate = Gate(1, MEMORY_MIB)
        ticket = await gate.enter(1)
        first, second = (asyncio.ensure_future(gate.enter(1)) for _ in range(2))
        await settle()
        gate.leave(ticket)  # the first one's turn is given, and it does not know yet
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        gate.leave(await second)
        assert (gate.inside, gate.queued, gate._used_mib) == (0, 0, 0)

    play(scene())


def test_random_days():
    """Long schedules, far beyond the slots, with clients that leave at any time."""
    seen = set()
    for seed in range(20):
        rng = random.Random(seed)
        arrivals = [
            (rng.uniform(0, 20), rng.choice([1, 5, 20, 50, 100]), rng.expovariate(2), rng.choice([None, 0.0, 1.0, 5.0]))
            for _ in range(400)
        ]
        _, ends = play(day(arrivals))
        seen |= set(ends)
    assert seen == {"done", "left", "at_capacity"}
