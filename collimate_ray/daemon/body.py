"""Request bodies, checked field by field. Must not run anything.

Source: design/WIRE.md (ExecRequest, "What we add").
"""

from __future__ import annotations

import base64
import binascii
import json
import re
import secrets
import shlex
from typing import Any

from collimate_ray.daemon.admission import Refusal
from collimate_ray.daemon.outcome import ExecRequest
from collimate_ray.sandbox.wire import (
    DEFAULT_TIMEOUT_S,
    LIMIT_NAMES,
    MAX_BATCH,
    MAX_TIMEOUT_S,
    RUNNER_CALL,
    ErrorCode,
)
from collimate_ray.seeds import fresh_seed, is_valid_seed

#: Ids and owners: what fits in a path segment and a log line.
_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,128}\Z")
#: The longest lease, s: a day.
_MAX_TTL_S = 86_400.0
#: The lease of an owner that names no time, s.
_DEFAULT_TTL_S = 60.0
#: Modes of an egress policy, and the policy's fields (design/WIRE.md, "Egress").
EGRESS_MODES = ("open", "none", "allowlist", "denylist")
_EGRESS_FIELDS = frozenset({"mode", "allow", "deny", "preset"})
#: Whole numbers among the limits.
_WHOLE_LIMITS = frozenset({"memory_mib", "processes", "files", "file_mib"})


def bad(field: str, expected: str, found: object) -> Refusal:
    """Make the refusal of a bad field: names field, expectation and what was found, cut."""
    shown = json.dumps(found, default=str)
    return Refusal(ErrorCode.BAD_REQUEST, f"{field}: expected {expected}, found {shown[:80]}")


def parse(raw: bytes) -> dict[str, Any]:
    """Decode a body.

    Raises:
        Refusal: ``bad_request``: it is not a JSON object.
    """
    try:
        body = json.loads(raw or b"{}")
    except (ValueError, RecursionError) as error:
        raise Refusal(ErrorCode.BAD_REQUEST, f"body: expected JSON: {str(error)[:120]}") from error
    if not isinstance(body, dict):
        raise bad("body", "a JSON object", body)
    return body


def template_of(body: dict[str, Any], templates: tuple[str, ...]) -> str:
    """Give the body's template id.

    Raises:
        Refusal: ``template_id_required``, ``bad_request`` or ``no_template``.
    """
    template = body.get("template_id")
    if template is None:
        raise Refusal(ErrorCode.TEMPLATE_ID_REQUIRED, "template_id is required")
    if not isinstance(template, str):
        raise bad("template_id", "a string", template)
    if template not in templates:
        known = ", ".join(templates)
        raise Refusal(ErrorCode.NO_TEMPLATE, f"no template: {template[:80]!r}; this daemon has {known}")
    return template


def lease_of(body: dict[str, Any]) -> tuple[str, float] | None:
    """Give the owner and the seconds of its lease, or None.

    Raises:
        Refusal: ``bad_request``.
    """
    owner = body.get("owner")
    if owner is None:
        return None
    return name_of("owner", owner), ttl_of(body)


def ttl_of(body: dict[str, Any]) -> float:
    """Give the seconds of a lease.

    Raises:
        Refusal: ``bad_request``.
    """
    return _number("ttl_seconds", body.get("ttl_seconds", _DEFAULT_TTL_S), _MAX_TTL_S)


def name_of(field: str, value: object) -> str:
    """Give a name that fits in a path.

    Raises:
        Refusal: ``bad_request``.
    """
    if not isinstance(value, str) or not _NAME.match(value):
        raise bad(field, "1 to 128 characters of A-Z a-z 0-9 _ . : -", value)
    return value


def check_egress(body: dict[str, Any], given: str) -> None:
    """Refuse an egress policy other than the one that is in force: none is ever quietly another.

    Args:
        body: May have ``egress``.
        given: The mode that this tier gives: ``none`` or ``open``.

    Raises:
        Refusal: ``bad_request``.
    """
    policy = body.get("egress")
    if policy is None:
        return
    if not isinstance(policy, dict):
        raise bad("egress", '{"mode": ...}', policy)
    for name in policy.keys() - _EGRESS_FIELDS:
        raise bad("egress", f"only {', '.join(sorted(_EGRESS_FIELDS))}", name)
    mode = policy.get("mode")
    if mode not in EGRESS_MODES:
        raise bad("egress.mode", f"one of {', '.join(EGRESS_MODES)}", mode)
    if mode != given or policy.keys() != {"mode"}:
        raise bad("egress", f'none or {{"mode": "{given}"}}, the only one that this tier gives', policy)


def batch(body: dict[str, Any]) -> tuple[list[Any], float | None]:
    """Give the execs of a batch, unchecked, and its deadline in seconds.

    Raises:
        Refusal: ``bad_request``.
    """
    execs, deadline = body.get("execs"), body.get("deadline_seconds")
    if not isinstance(execs, list) or not 1 <= len(execs) <= MAX_BATCH:
        found = f"{len(execs)} of them" if isinstance(execs, list) else execs
        raise bad("execs", f"a list of 1 to {MAX_BATCH} execs", found)
    return execs, None if deadline is None else _number("deadline_seconds", deadline, _MAX_TTL_S)


def exec_request(body: dict[str, Any], egress: str) -> ExecRequest:
    """Make the checked exec of a body.

    Args:
        body: ExecRequest of the wire.
        egress: The mode that this tier gives.

    Raises:
        Refusal: ``bad_request`` or ``invalid_seed``.
    """
    check_egress(body, egress)
    kind, text = _program(body)
    return ExecRequest(
        exec_id=name_of("id", body["id"]) if body.get("id") is not None else f"req_{secrets.token_hex(8)}",
        kind=kind,
        text=text,
        seed=_seed(body.get("seed")),
        files=_files(body.get("files")),
        timeout_s=_timeout(body.get("timeout_seconds")),
        limits=_limits(body.get("limits")),
        stdin=_stdin(body.get("stdin_b64")),
    )


def _program(body: dict[str, Any]) -> tuple[str, str]:
    for field in ("command", "commands", "code"):
        value = body.get(field)
        if value is None:
            continue
        text = _joined(value) if field == "commands" else value
        if not isinstance(text, str):
            raise bad(field, "a string", value)
        if field == "code":
            return ("runner" if text.strip() == RUNNER_CALL else "code"), text
        if "\0" in text:
            raise bad(field, "text without NUL", text)
        return "command", text
    raise Refusal(ErrorCode.BAD_REQUEST, "command: expected one of command, commands, code, found none of them")


def _joined(commands: object) -> str:
    if not isinstance(commands, list) or not commands:
        raise bad("commands", "a list of at least one [argv...]", commands)
    for argv in commands:
        if not isinstance(argv, list) or not argv or not all(isinstance(arg, str) for arg in argv):
            raise bad("commands", "lists of at least one string", argv)
    return "\n".join(shlex.join(argv) for argv in commands)


def _seed(seed: object) -> str:
    if seed is None:
        return fresh_seed()
    if not isinstance(seed, str) or not is_valid_seed(seed):
        raise Refusal(ErrorCode.INVALID_SEED, f"seed: expected 64 hex characters, found {json.dumps(seed)[:80]}")
    return seed


def _files(files: object) -> tuple[tuple[str, str], ...]:
    if files is None:
        return ()
    if not isinstance(files, list):
        raise bad("files", "a list of {path, content}", files)
    return tuple(_file(f"files[{index}]", entry) for index, entry in enumerate(files))


def _file(field: str, entry: object) -> tuple[str, str]:
    if not isinstance(entry, dict):
        raise bad(field, "{path, content}", entry)
    path, content = entry.get("path"), entry.get("content", "")
    if not isinstance(path, str) or not path or "\0" in path:
        raise bad(f"{field}.path", "a path without NUL", path)
    if not isinstance(content, str):
        raise bad(f"{field}.content", "a string", content)
    if content and not content.endswith("\n"):
        content += "\n"  # as a daemon that writes by heredoc does
    return path, content


def _timeout(value: object) -> float:
    expected = f"a number from 1 to {MAX_TIMEOUT_S}"
    if value is None:
        return DEFAULT_TIMEOUT_S
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 1 <= value <= MAX_TIMEOUT_S:
        raise bad("timeout_seconds", expected, value)
    return value


def _limits(limits: object) -> dict[str, float]:
    if limits is None:
        return {}
    if not isinstance(limits, dict):
        raise bad("limits", "an object", limits)
    for name, value in limits.items():
        if name not in LIMIT_NAMES:
            raise bad("limits", f"only {', '.join(LIMIT_NAMES)}", name)
        _number(f"limits.{name}", value, 1e9)
        if name in _WHOLE_LIMITS and value != int(value):
            raise bad(f"limits.{name}", "a whole number", value)
    return limits


def _number(field: str, value: object, most: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= most:
        raise bad(field, f"a number above 0, at most {most:g}", value)
    return value


def _stdin(text: object) -> bytes | None:
    if text is None:
        return None
    try:
        return base64.b64decode(text, validate=True) if isinstance(text, str) else _not_base64(text)
    except (binascii.Error, ValueError) as error:
        raise bad("stdin_b64", "base64", text) from error


def _not_base64(found: object) -> bytes:
    raise bad("stdin_b64", "base64", found)
