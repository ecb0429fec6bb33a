"""Batches of execs: a line for each, in the order of their ends, whatever happens to them or to the listener."""

import asyncio

from hypothesis import given, settings
from hypothesis import strategies as st
from test_admission import play

from collimate_ray.daemon import batch

FULL = (503, {"error": "at capacity: x", "error_code": "at_capacity"})


async def collect(lines):
    return [line async for line in lines]


class Runs:
    """Runs bodies, which are seconds, and knows how many run."""

    def __init__(self):
        self.now = self.most = self.stopped = 0

    async def __call__(self, body):
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            await asyncio.sleep(body)
        except asyncio.CancelledError:
            self.stopped += 1
            raise
        finally:
            self.now -= 1
        return 200, {"body": body}


@given(st.lists(st.sampled_from([0, 0.1, 1, 5]), max_size=30), st.integers(1, 8), st.none() | st.floats(0, 20))
@settings(max_examples=200, deadline=None)
def test_each_has_one_line(bodies, width, deadline_s):
    async def scene():
        run, loop = Runs(), asyncio.get_running_loop()
        started = loop.time()
        lines = await collect(batch.lines(bodies, run, width=width, deadline_s=deadline_s))
        assert sorted(line["index"] for line in lines) == list(range(len(bodies)))
        assert run.now == 0
        assert run.most == (min(width, len(bodies)) if deadline_s is None else run.most) <= width
        done = [line for line in lines if line["http_status"] == 200]
        assert all(line["body"] == bodies[line["index"]] for line in done)
        late = [line["error_code"] for line in lines if line["http_status"] != 200]
        assert set(late) <= {"deadline", "at_capacity"}
        assert late.count("deadline") == run.stopped
        assert deadline_s is not None or not late
        assert deadline_s is None or loop.time() - started <= deadline_s + 0.001

    play(scene())


def test_lines_come_in_the_order_of_the_ends():
    async def scene():
        lines = await collect(batch.lines([3, 1, 2, 0], Runs(), width=4, deadline_s=None))
        assert [line["index"] for line in lines] == [3, 1, 2, 0]

    play(scene())


def test_the_deadline_is_told_to_those_that_run_and_to_those_that_wait():
    async def scene():
        lines = await collect(batch.lines([1, 100, 100, 1], Runs(), width=2, deadline_s=10))
        assert [(line["index"], line["http_status"], line.get("error_code")) for line in lines] == [
            (0, 200, None),
            (1, 504, "deadline"),
            (2, 504, "deadline"),
            (3, 503, "at_capacity"),
        ]
        assert "10 s" in lines[1]["error"]

    play(scene())


def test_a_full_queue_is_waited_for():
    tries = []

    async def run(body):
        tries.append(body)
        return FULL if len(tries) < 20 else (200, {})

    async def scene():
        (line,) = await collect(batch.lines(["x"], run, width=1, deadline_s=None))
        assert line == {"index": 0, "http_status": 200}
        assert len(tries) == 20

    play(scene())


def test_a_queue_that_stays_full_ends_with_the_deadline():
    async def run(body):
        return FULL

    async def scene():
        lines = await collect(batch.lines(["x", "y"], run, width=1, deadline_s=5))
        assert sorted(line["index"] for line in lines) == [0, 1]
        assert all(line["http_status"] in (503, 504) for line in lines)

    play(scene())


def test_other_refusals_are_told_at_once():
    async def run(body):
        return 400, {"error": "limits: x", "error_code": "bad_request"}

    async def scene():
        lines = await collect(batch.lines([1, 2], run, width=2, deadline_s=None))
        assert {line["error_code"] for line in lines} == {"bad_request"}

    play(scene())


def test_an_exec_that_is_cancelled_alone_is_told():
    async def run(body):
        if body == "cancelled":
            raise asyncio.CancelledError
        return 200, {}

    async def scene():
        lines = await collect(batch.lines(["fine", "cancelled", "fine"], run, width=1, deadline_s=None))
        assert [line.get("error_code") for line in lines] == [None, "cancelled", None]
        assert lines[1]["http_status"] == 499

    play(scene())


def test_all_stop_when_nobody_listens_any_more():
    async def scene():
        run = Runs()
        lines = batch.lines([0, 100, 100, 100, 100], run, width=3, deadline_s=None)
        assert (await anext(lines))["index"] == 0
        await asyncio.sleep(1)
        await lines.aclose()
        assert (run.now, run.stopped) == (0, 2)

        listening = asyncio.ensure_future(collect(batch.lines([100] * 5, run, width=3, deadline_s=50)))
        await asyncio.sleep(1)
        listening.cancel()
        await asyncio.wait([listening])
        assert (run.now, run.stopped) == (0, 5)
        assert len(asyncio.all_tasks()) == 1

    play(scene())
