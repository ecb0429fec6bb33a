"""Log lines of the daemon: one an event, ``event=NAME key=value ...``, with the ids that tie it to others.

Must not log what a request holds: no code, no output, no words of a refusal that quote them.
"""

from __future__ import annotations

import json
import logging

_log = logging.getLogger("collimate_ray.daemon")


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
