"""The slots of a node, on a real daemon. Ray-free."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from queue import Queue
from typing import Any

import pytest

from collimate_ray import pool as pool_module
from collimate_ray.errors import CheckerError, InfraError, SandboxUnavailable, SessionLost
from collimate_ray.messages import Outcome
from collimate_ray.pool import CASES_KEPT, CaseCache, Job, SlotPool, classify
from collimate_ray.results import Verdict
from collimate_ray.sandbox.client import SandboxClient
from collimate_ray.spec import spec_from_dict

SEED = "5a" * 32
SQUARE = {
    "kind": "unit_tests",
    "entry": "solve",
    "tests": [{"input": [3], "expected": 9}],
    "limits": {"time_s": 60},
}
PROPERTY = {
    "kind": "property",
    "entry": "solve",
    "k": 3,
    "reference": "def reference(x):\n    return x * x\n",
    "generator": "def generate(rng):\n    return [rng.randrange(3, 99)]\n",
}
RIGHT = "def solve(x):\n    return x * x\n"
FOREVER = "import time\ntime.sleep(1000)\n" + RIGHT


@pytest.fixture
def client(daemon: Any) -> Iterator[SandboxClient]:
    with SandboxClient(unix_socket=daemon.socket) as made:
        yield made


@pytest.fixture
def slots(client: SandboxClient) -> Iterator[SlotPool]:
    made = SlotPool(client, 2, can_cancel=True)
    yield made
    made.close()


def job(index: int, completion: str = RIGHT, spec: dict[str, Any] = SQUARE, **fields: Any) -> Job:
    return Job(("g", index, 1), completion, spec_from_dict(spec), SEED, "python", **fields)


def test_each_job_ends_once(slots: SlotPool) -> None:
    done: Queue[Outcome] = Queue()
    for index, text in enumerate([RIGHT, "def solve(x):\n    return 1\n", "no code"]):
        slots.submit(job(index, text), done.put)
    found = {outcome.key[1]: outcome.result for outcome in [done.get(timeout=60) for _ in range(3)]}
    assert [found[index].verdict for index in range(3)] == [Verdict.PASSED, Verdict.FAILED, Verdict.NO_CODE]
    assert slots.running == 0
    assert done.empty()


def test_job_that_is_open_already_is_not_run_twice(slots: SlotPool) -> None:
    done: Queue[Outcome] = Queue()
    slots.submit(job(0), done.put)
    slots.submit(job(0), done.put)
    assert done.get(timeout=60).result
    slots.submit(job(1), done.put)
    assert done.get(timeout=60).key[1] == 1


def test_cancel_right_after_the_start_leaves_nothing_running(slots: SlotPool, client: SandboxClient) -> None:
    done: Queue[Outcome] = Queue()
    for index in range(6):
        slots.submit(job(index, FOREVER), done.put)
        slots.cancel([("g", index, 1)])
    slots.submit(job(9), done.put)
    assert done.get(timeout=60).key == ("g", 9, 1)
    assert client.health()["running"] == 0


def test_cancelled_job_frees_its_slot_and_says_nothing(slots: SlotPool, client: SandboxClient) -> None:
    done: Queue[Outcome] = Queue()
    before = client.health()["running"]
    for index in range(2):
        slots.submit(job(index, FOREVER), done.put)
    slots.submit(job(2), done.put)  # waits for a slot
    wait_for(lambda: client.health()["running"] == before + 2)
    slots.cancel([("g", 0, 1), ("g", 1, 1), ("nobody", 0, 1)])
    assert done.get(timeout=60).key[1] == 2
    assert done.empty()
    assert slots.running == 0


def test_daemon_that_is_not_there() -> None:
    done: Queue[Outcome] = Queue()
    with SandboxClient(unix_socket="/nowhere/serve.sock", retries=0) as nobody:
        slots = SlotPool(nobody, 1)
        slots.submit(job(0), done.put)
        outcome = done.get(timeout=60)
        slots.close()
    assert isinstance(outcome.error, SandboxUnavailable)
    assert outcome.result is None


def test_deadline_that_has_passed(slots: SlotPool) -> None:
    done: Queue[Outcome] = Queue()
    slots.submit(job(0, FOREVER, deadline=time.monotonic() + 0.5), done.put)
    assert isinstance(done.get(timeout=60).error, InfraError)


def test_cases_are_made_once_for_all_candidates(client: SandboxClient, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    real = pool_module.prepare_cases

    def counted(*args: Any, **options: Any) -> Any:
        made.append(1)
        return real(*args, **options)

    monkeypatch.setattr(pool_module, "prepare_cases", counted)
    cache = CaseCache(client)
    found: Queue[Any] = Queue()
    threads = [
        threading.Thread(target=lambda index=index: found.put(cache.get(job(index, spec=PROPERTY))))
        for index in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1
    assert len({id(found.get()) for _ in threads}) == 1


def test_cases_that_can_not_be_made_are_asked_for_again(client: SandboxClient, monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[Any] = [SessionLost("a"), SessionLost("b"), SessionLost("c"), ["cases"]]

    def scripted(*args: Any, **options: Any) -> Any:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(pool_module, "prepare_cases", scripted)
    cache = CaseCache(client)
    with pytest.raises(CheckerError, match="its session died 2 times: b"):
        cache.get(job(0, spec=PROPERTY))
    assert cache.get(job(0, spec=PROPERTY)) == ["cases"]
    assert not answers


def test_cases_kept_are_bounded(client: SandboxClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "prepare_cases", lambda *args, **options: [])
    cache = CaseCache(client)
    for number in range(CASES_KEPT + 5):
        spec = spec_from_dict(PROPERTY)
        cache.get(Job(("g", 0, 1), RIGHT, spec, f"{number:064x}", "python"))
    assert len(cache._entries) == CASES_KEPT


def test_fault_of_ours_is_no_verdict_and_is_not_tried_again() -> None:
    error = classify(TypeError("oops"))
    assert isinstance(error, InfraError)
    assert not error.retriable
    assert "TypeError: oops" in str(error)
    lost = SessionLost("x")
    assert classify(lost) is lost


def wait_for(condition: Any) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)
