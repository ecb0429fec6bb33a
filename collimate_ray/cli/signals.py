"""Being told to stop: SIGTERM and SIGHUP end a command like Ctrl-C does, and clean-up is not disturbed.

Must not be used by ``serve``, which has its own rules for signals. Ray replaces the handler of SIGTERM in
the driver, hence ``arm`` is called again after each call into Ray that may have done so.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_ASKS_TO_STOP = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class _State:
    """Whether requests are held back now, and whether one came."""

    depth = 0
    requested = False


def arm() -> None:
    """Make each request to stop raise KeyboardInterrupt in the main thread."""
    for number in _ASKS_TO_STOP:
        signal.signal(number, _on_request)


def _on_request(number: int, frame: FrameType | None) -> None:
    _State.requested = True
    if not _State.depth:
        raise KeyboardInterrupt


def checkpoint() -> None:
    """Raise KeyboardInterrupt if a request came and what it interrupted swallowed it: some callbacks do."""
    if _State.requested and not _State.depth:
        raise KeyboardInterrupt


@contextmanager
def undisturbed() -> Iterator[None]:
    """Hold requests to stop back inside; one that came first then raises KeyboardInterrupt at the end.

    For set-up that must note what it has to undo, and for clean-up, which is short and, cut off, would leave
    processes.
    """
    before = _State.requested
    _State.depth += 1
    arm()
    try:
        yield
    finally:
        _State.depth -= 1
    if not before:
        checkpoint()
