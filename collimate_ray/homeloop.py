"""An event loop in a thread of its own, where an actor keeps its state. Ray-free.

Why: each concurrency group of a Ray actor has its own loop, and asyncio objects must not cross loops. Actor methods
hand their work to the one home loop, so that its state needs no locks and no method can be starved by another.
Must not run blocking code on the loop.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class HomeLoop:
    """One event loop in one daemon thread.

    Args:
        name: Name of the thread.
    """

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run ``work`` on the home loop and await its result from any other loop; a cancel goes through."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    def soon(self, call: Callable[..., object], *args: object) -> None:
        """Call ``call(*args)`` on the home loop, from any thread; dropped when the loop is closed."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(call, *args)

    def close(self) -> None:
        """Stop and close the loop; not from the loop itself."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
