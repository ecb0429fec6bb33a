"""Many execs in one request: a few run at a time, each has its line as it ends. Source: design/WIRE.md, "exec-batch".

Must not know HTTP. The rest of a batch waits here and not in the admission queue, so that a batch larger than that
queue is no reason to refuse, and other clients' execs take their turns between a batch's own.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

from collimate_ray.sandbox.wire import STATUS_OF, ErrorCode

#: Execs of a batch in or before the slots, a slot: one that runs, and one that is next without a pause.
WIDTH_A_SLOT = 2
#: Pause before an exec of a batch that found the queue full of others' knocks again, s.
_KNOCK_S = 0.05

#: Runs an exec of a batch: its body -> HTTP status and JSON-able body.
Run = Callable[[Any], Awaitable[tuple[int, dict[str, Any]]]]


async def lines(
    execs: Sequence[Any], run: Run, *, width: int, deadline_s: float | None
) -> AsyncIterator[dict[str, Any]]:
    """Run execs, give a line for each as it ends; those that are left when nobody listens any more are stopped.

    Args:
        execs: Their bodies.
        run: Runs one; cancelled, it stops it.
        width: How many at a time.
        deadline_s: Seconds after which the rest is stopped and told so, or None.

    Yields:
        ``{"index", "http_status", ...}``.
    """
    loop = asyncio.get_running_loop()
    until = None if deadline_s is None else loop.time() + deadline_s
    waiting = deque(enumerate(execs))
    running: dict[asyncio.Task[tuple[int, dict[str, Any]]], int] = {}
    try:
        while (waiting or running) and (until is None or loop.time() < until):
            while waiting and len(running) < width:
                index, body = waiting.popleft()
                running[loop.create_task(_patient(run, body))] = index
            left = None if until is None else until - loop.time()
            done, _ = await asyncio.wait(running, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                yield _line(running.pop(task), task)
        await _stop(running)
        for task, index in running.items():
            yield _line(index, task, f"the batch's deadline of {deadline_s:g} s passed")
        for index, _ in waiting:
            yield _told(index, ErrorCode.AT_CAPACITY, f"at capacity: no slot within the batch's {deadline_s:g} s")
    finally:
        await _stop(running)


async def _patient(run: Run, body: Any) -> tuple[int, dict[str, Any]]:
    while True:
        status, answer = await run(body)
        if answer.get("error_code") != ErrorCode.AT_CAPACITY:
            return status, answer
        await asyncio.sleep(_KNOCK_S)  # nothing of it ran


async def _stop(running: dict[asyncio.Task[Any], int]) -> None:
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)


def _line(index: int, task: asyncio.Task[tuple[int, dict[str, Any]]], late: str = "") -> dict[str, Any]:
    if task.cancelled():
        return _told(index, ErrorCode.DEADLINE, late) if late else _told(index, ErrorCode.CANCELLED, "cancelled")
    status, answer = task.result()
    return {"index": index, "http_status": status, **answer}


def _told(index: int, code: str, message: str) -> dict[str, Any]:
    return {"index": index, "http_status": STATUS_OF[code], "error": message, "error_code": code}
