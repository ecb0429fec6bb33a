"""What a failed request means: transport failures and refusals, as errors of ours. Source: design/WIRE.md, "Errors".

The table of the wire boundary, which stands in ``client.py``. Must not send, sleep or count attempts.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from collimate_ray.errors import (
    CollimateRayError,
    ConfigError,
    SandboxAtCapacity,
    SandboxDraining,
    SandboxUnavailable,
    SessionLost,
    WireError,
)
from collimate_ray.sandbox.transport import MAX_RESPONSE_BYTES, AnswerTooLarge, NeverSent, Reply
from collimate_ray.sandbox.wire import ErrorCode

#: Characters of a daemon's words that go into an error text.
SHOWN_CHARS = 500

_CALLERS_MISTAKE = (
    ErrorCode.NO_TEMPLATE,
    ErrorCode.TEMPLATE_ID_REQUIRED,
    ErrorCode.BAD_REQUEST,
    ErrorCode.INVALID_SEED,
    ErrorCode.FORBIDDEN,
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

    error: CollimateRayError
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
    if isinstance(error, NeverSent):
        return Failure(SandboxUnavailable(f"{name}: {_shown(error.__cause__)}", None, False), True, error)
    # a connection that closed before an answer is an HTTPException too, and no nonsense
    if isinstance(error, http.client.HTTPException) and not isinstance(error, http.client.RemoteDisconnected):
        return Failure(WireError(f"{name}: broken answer: {_shown(error)}"), repeat, error)
    return Failure(SandboxUnavailable(f"{name}: {_shown(error)}"), repeat, error)


def _shown(words: object) -> str:
    text = str(words) or type(words).__name__
    return text if len(text) <= SHOWN_CHARS else text[:SHOWN_CHARS] + "..."


def refusal(name: str, reply: Reply, repeat: bool) -> Failure:
    """Classify an answer whose status is not 2xx; arguments as ``transport_failure``'s."""
    return told_refusal(name, reply.status, _told(reply), repeat)


def told_refusal(name: str, status: int, told: Mapping[str, Any], repeat: bool) -> Failure:
    """Classify a refusal by its status and its body, as ``refusal`` does."""
    code = told.get("error_code")
    code = code if isinstance(code, str) else ""
    words = _shown(told.get("error", "no reason given"))
    text = f"{name}: {status} {code}: {words}" if code else f"{name}: {status}: {words}"
    error = _refusal_error(text, status, code, "error" in told)
    safe = isinstance(error, SandboxDraining | SandboxAtCapacity)
    return Failure(error, safe or (repeat and status >= 500), None, status, code)


def _told(reply: Reply) -> dict[str, Any]:
    try:
        told = json.loads(reply.body)
    except (ValueError, RecursionError):
        return {}
    return told if isinstance(told, dict) else {}


def _refusal_error(text: str, status: int, code: str, explained: bool) -> CollimateRayError:
    if code == ErrorCode.DRAINING:
        return SandboxDraining(text)
    if code in (ErrorCode.AT_CAPACITY, ErrorCode.SESSION_BRINGUP_FAILED):
        return SandboxAtCapacity(text)
    if code == ErrorCode.NO_SUCH_SESSION:
        return SessionLost(text, None, False)
    if code == ErrorCode.SESSION_GONE or status == 410:
        return SessionLost(text)
    # 413: a body over what the daemon takes is the caller's mistake too
    if code in _CALLERS_MISTAKE or (status in (400, 413) and explained):
        return ConfigError(text)
    # zygote_lost among them: the host of the session died, which is never charged to a candidate
    if status >= 500 or code == ErrorCode.CANCELLED:
        return SandboxUnavailable(text)
    return WireError(text)


def decoded(name: str, body: bytes) -> Any:
    """Decode the JSON of a 2xx answer.

    Raises:
        WireError: It is no JSON.
    """
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise WireError(f"{name}: expected JSON, found {body[:80]!r}: {_shown(error)}") from error
