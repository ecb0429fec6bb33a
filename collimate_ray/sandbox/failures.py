"""What a failed request means: transport failures and refusals, as errors of ours. Source: design/WIRE.md, "Errors".

The table of the wire boundary, which stands in ``client.py``. Must not send, sleep or count attempts.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from requests.exceptions import InvalidURL
from urllib3.exceptions import LocationValueError

from collimate_ray.errors import (
    ConfigError,
    SandboxAtCapacity,
    SandboxDraining,
    SandboxUnavailable,
    SessionLost,
    WireError,
)
from collimate_ray.sandbox.transport import MAX_RESPONSE_BYTES, AnswerTooLarge, Reply, never_sent
from collimate_ray.sandbox.wire import ErrorCode

#: Characters of a daemon's words that go into an error text.
SHOWN_CHARS = 500

_CALLERS_MISTAKE = (
    ErrorCode.NO_TEMPLATE,
    ErrorCode.TEMPLATE_ID_REQUIRED,
    ErrorCode.BAD_REQUEST,
    ErrorCode.INVALID_SEED,
)


@dataclass(frozen=True)
class Failure:
    """A failed attempt.

    Attributes:
        error: What to raise.
        repeatable: Whether the same request may be sent again.
        cause: What was caught, if anything was.
        status: HTTP status of the refusal, 0 without one.
        code: The refusal's ``error_code``, "" without one.
    """

    error: Exception
    repeatable: bool
    cause: BaseException | None = None
    status: int = 0
    code: str = ""


def transport_failure(name: str, error: Exception, repeat: bool) -> Failure:
    """Classify what an exchange raised.

    Args:
        name: The request, for people.
        error: What was raised.
        repeat: Whether the request may be sent again even if it may have arrived.
    """
    if isinstance(error, AnswerTooLarge):
        return Failure(WireError(f"{name}: the answer is over {MAX_RESPONSE_BYTES} bytes"), False, error)
    if isinstance(error, InvalidURL | LocationValueError):
        return Failure(ConfigError(f"base_url: {error}"), False, error)
    if never_sent(error):
        reason = _innermost(error)
        # urllib3's own text repeats where; what the socket said is enough
        words = _shown(reason.__cause__ or reason.__context__ or reason)
        return Failure(SandboxUnavailable(f"{name}: {words}", None, False), True, error)
    if any(_is_nonsense(part) for part in _nested(error)):
        return Failure(WireError(f"{name}: broken answer: {_shown(_innermost(error))}"), repeat, error)
    return Failure(SandboxUnavailable(f"{name}: {_shown(_innermost(error))}"), repeat, error)


def _is_nonsense(error: BaseException) -> bool:
    """True for bytes that are not HTTP and for a body cut short; a closed connection has an HTTPException too."""
    return isinstance(error, http.client.HTTPException) and not isinstance(error, http.client.RemoteDisconnected)


def _nested(error: BaseException) -> Iterator[BaseException]:
    """Walk from a library's error to those it wraps. Not by __context__, which may be the caller's own affair."""
    yield error
    for part in (getattr(error, "reason", None), *error.args):
        if isinstance(part, BaseException):
            yield from _nested(part)


def _innermost(error: BaseException) -> BaseException:
    return list(_nested(error))[-1]


def _shown(words: object) -> str:
    # urllib3 puts its pool before its words; where it was is told already
    text = str(words).removeprefix(f"{getattr(words, 'pool', '')}: ") or type(words).__name__
    return text if len(text) <= SHOWN_CHARS else text[:SHOWN_CHARS] + "..."


def refusal(name: str, reply: Reply, repeat: bool) -> Failure:
    """Classify an answer whose status is not 2xx; arguments as ``transport_failure``'s."""
    told = _told(reply)
    code = told.get("error_code")
    code = code if isinstance(code, str) else ""
    words = _shown(told.get("error", "no reason given"))
    text = f"{name}: {reply.status} {code}: {words}" if code else f"{name}: {reply.status}: {words}"
    error = _refusal_error(text, reply.status, code, "error" in told)
    safe = isinstance(error, SandboxDraining | SandboxAtCapacity)
    return Failure(error, safe or (repeat and reply.status >= 500), None, reply.status, code)


def _told(reply: Reply) -> dict[str, Any]:
    try:
        told = json.loads(reply.body)
    except (ValueError, RecursionError):
        return {}
    return told if isinstance(told, dict) else {}


def _refusal_error(text: str, status: int, code: str, explained: bool) -> Exception:
    if code == ErrorCode.DRAINING:
        return SandboxDraining(text)
    if code in (ErrorCode.AT_CAPACITY, ErrorCode.SESSION_BRINGUP_FAILED):
        return SandboxAtCapacity(text)
    if code in (ErrorCode.NO_SUCH_SESSION, ErrorCode.SESSION_GONE) or status == 410:
        return SessionLost(text)
    # 413: a body over what the daemon takes is the caller's mistake too
    if code in _CALLERS_MISTAKE or (status in (400, 413) and explained):
        return ConfigError(text)
    return SandboxUnavailable(text) if status >= 500 else WireError(text)


def decoded(name: str, body: bytes) -> Any:
    """Decode the JSON of a 2xx answer.

    Raises:
        WireError: It is no JSON.
    """
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise WireError(f"{name}: expected JSON, found {body[:80]!r}: {_shown(error)}") from error
