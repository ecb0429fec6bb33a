"""The engine between core and nodes, with a carrier that only notes down. Ray-free."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import pytest

from collimate_ray.core import NodeLost, NodeUp
from collimate_ray.engine import FINISHED_KEPT, GUARD_S, Engine
from collimate_ray.errors import CheckerError, GraderClosed, GroupFailed
from collimate_ray.messages import JobKey, Outcome, ShardItem, SpecParcel, Terms
from collimate_ray.results import GradeResult, GroupResult, Verdict
from collimate_ray.submission import make_submission

PASSED = GradeResult(1.0, verdict=Verdict.PASSED)


class Notebook:
    """A carrier that carries nothing."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, ShardItem, Terms]] = []
        self.cancelled: list[JobKey] = []

    def send(
        self, node_id: str, items: tuple[ShardItem, ...], terms: Mapping[str, Terms], specs: Mapping[str, Any]
    ) -> None:
        assert {one.spec_hash for one in terms.values()} == set(specs)
        self.sent += [(node_id, item, terms[item.key[0]]) for item in items]

    def cancel(self, node_id: str, keys: tuple[JobKey, ...]) -> None:
        self.cancelled += keys


Body = Callable[[Engine, Notebook], Awaitable[None]]


def run(body: Body) -> None:
    async def main() -> None:
        book = Notebook()
        engine = Engine(book, random.Random(1))
        await body(engine, book)
        engine.scheduler.validate()

    asyncio.run(main())


def submit(engine: Engine, completions: list[str], **options: Any) -> asyncio.Task[GroupResult]:
    submission = make_submission(completions, SpecParcel("h", {}), **options)
    return asyncio.get_running_loop().create_task(engine.grade(submission, {}))


def answer(engine: Engine, book: Notebook, result: GradeResult = PASSED) -> None:
    while book.sent:
        node_id, item, _ = book.sent.pop(0)
        engine.absorb(node_id, [Outcome(item.key, result)])


def test_group_comes_back_in_order() -> None:
    async def body(engine: Engine, book: Notebook) -> None:
        engine.feed(NodeUp("n1", 2), NodeUp("n2", 2))
        group = submit(engine, ["a", "b", "c"], group_id="g", limits={"time_s": 3})
        await asyncio.sleep(0)
        assert sorted(item.completion for _, item, _ in book.sent) == ["a", "b", "c"]
        assert book.sent[0][2].limits == {"time_s": 3}
        assert 600 < book.sent[0][2].deadline_s <= 600 + GUARD_S
        answer(engine, book)
        result = await group
        assert result.group_id == "g"
        assert result.rewards.tolist() == [1, 1, 1]
        assert engine.stats()["verdicts"] == {"passed": 3}

    run(body)


def test_same_request_joins_and_is_remembered() -> None:
    async def body(engine: Engine, book: Notebook) -> None:
        engine.feed(NodeUp("n1", 4))
        first, second = submit(engine, ["a"], group_id="g"), submit(engine, ["a"], group_id="g")
        await asyncio.sleep(0)
        assert len(book.sent) == 1
        answer(engine, book)
        assert await first is await second
        assert await submit(engine, ["a"], group_id="g") is await first
        other = submit(engine, ["b"], group_id="g")  # other work under the same name is not answered from memory
        await asyncio.sleep(0)
        assert len(book.sent) == 1
        other.cancel()
        await asyncio.wait([other])

    run(body)


def test_memory_is_bounded() -> None:
    async def body(engine: Engine, book: Notebook) -> None:
        for number in range(FINISHED_KEPT + 2):
            await submit(engine, [], group_id=f"g{number}")
        assert len(engine._finished) == FINISHED_KEPT

    run(body)


def test_late_and_repeated_answers_count_once() -> None:
    async def body(engine: Engine, book: Notebook) -> None:
        engine.feed(NodeUp("n1", 1))
        group = submit(engine, ["a"])
        await asyncio.sleep(0)
        _, old, _ = book.sent.pop()
        engine.feed(NodeLost("n1"))
        engine.feed(NodeUp("n2", 1))
        engine.absorb("n1", [Outcome(old.key, GradeResult(0.0, verdict=Verdict.FAILED))])
        assert not group.done()
        answer(engine, book)
        engine.absorb("n2", [Outcome(old.key, PASSED)])
        assert (await group).rewards.tolist() == [1]
        stats = engine.stats()
        assert (stats["grades"], stats["reroutes"], stats["groups"]) == (1, 1, 1)

    run(body)


def test_deadline_fails_with_partial() -> None:
    async def body(engine: Engine, book: Notebook) -> None:
        engine.feed(NodeUp("n1", 1))
        group = submit(engine, ["a", "b"], group_id="g", deadline_s=0.05)
        await asyncio.sleep(0)
        engine.absorb("n1", [Outcome(book.sent.pop()[1].key, PASSED)])
        with pytest.raises(GroupFailed, match="group g: deadline") as caught:
            await group
        assert caught.value.partial.group_id == "g"
        assert sorted(caught.value.partial.valid.tolist()) == [False, True]
        assert len(book.cancelled) == 1

    run(body)


def test_cancel_by_name_and_by_caller() -> None:
    async def body(engine: Engine, book: Notebook) -> None:
        engine.feed(NodeUp("n1", 4))
        named, left = submit(engine, ["a"], group_id="g"), submit(engine, ["b"])
        await asyncio.sleep(0)
        assert engine.cancel("g") == 1
        with pytest.raises(GroupFailed, match="group g: cancelled"):
            await named
        left.cancel()
        await asyncio.wait([left])
        assert engine.idle
        assert len(book.cancelled) == 2
        assert engine.cancel("g") == 0

    run(body)


def test_group_lives_while_one_of_its_callers_waits() -> None:
    async def body(engine: Engine, book: Notebook) -> None:
        engine.feed(NodeUp("n1", 4))
        first, second = submit(engine, ["a"], group_id="g"), submit(engine, ["a"], group_id="g")
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.wait([first])
        answer(engine, book)
        assert (await second).valid.all()

    run(body)


def test_error_of_the_spec_fails_the_group() -> None:
    async def body(engine: Engine, book: Notebook) -> None:
        engine.feed(NodeUp("n1", 4))
        group = submit(engine, ["a"], on_infra_error="mask")
        await asyncio.sleep(0)
        node_id, item, _ = book.sent.pop()
        engine.absorb(node_id, [Outcome(item.key, error=CheckerError("reference: no"))])
        with pytest.raises(CheckerError, match="reference: no"):
            await group
        assert engine.stats()["spec_errors"] == {"CheckerError": 1}
        assert engine.stats()["infra_errors"] == {}

    run(body)


def test_close_tells_who_waits() -> None:
    async def body(engine: Engine, book: Notebook) -> None:
        group = submit(engine, ["a"])
        await asyncio.sleep(0)
        engine.close()
        with pytest.raises(GraderClosed):
            await group
        with pytest.raises(GraderClosed):
            await submit(engine, ["a"])

    run(body)
