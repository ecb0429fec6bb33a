"""Log lines of the daemon: one an event, ``event=NAME key=value ...``, with the ids that tie it to others.

Must not log what a request holds: no code, no output, no words of a refusal that quote them.
"""

from __future__ import annotations

import json
import logging
import os
import select
import sys

#: What a pipe that can be written takes at once, and whole (pipe(7)).
_PIPE_BYTES = 4096

_log = logging.getLogger("collimate_ray.daemon")


class _Unhurried(logging.Handler):
    """Writes to stderr, and drops what nobody is there to read: a full pipe must not hold up the daemon."""

    def emit(self, record: logging.LogRecord) -> None:
        line = self.format(record).encode("utf-8", "backslashreplace")[: _PIPE_BYTES - 1] + b"\n"
        poll = select.poll()
        try:
            poll.register(sys.stderr.fileno(), select.POLLOUT)
            if any(event & select.POLLOUT for _, event in poll.poll(0)):
                os.write(sys.stderr.fileno(), line)
        except (OSError, ValueError):  # closed, or its reader has gone
            return


def to_stderr(verbose: bool) -> None:
    """Send this process's log lines to stderr: warnings and what is worse, or all."""
    level = logging.INFO if verbose else logging.WARNING
    logging.basicConfig(level=level, format="%(name)s: %(message)s", handlers=[_Unhurried()], force=True)


def note(event: str, level: int = logging.INFO, **fields: object) -> None:
    """Log an event; costs next to nothing where nobody listens.

    Args:
        event: Its name, such as ``session.created``.
        level: Of ``logging``.
        fields: Ids, numbers and words; None is left out.
    """
    if _log.isEnabledFor(level):
        told = [f"{name}={_shown(value)}" for name, value in fields.items() if value is not None]
        _log.log(level, "%s", " ".join([f"event={event}", *told]))


def _shown(value: object) -> str:
    text = str(value)
    return text if text and text.isprintable() and not set(text) & set(' "=') else json.dumps(text)
