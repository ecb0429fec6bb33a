"""What an exec's request holds: checked arguments, and the body made of them. Pure. Source: design/WIRE.md, "Routes".

Must not send, and must not put a field into a body that was not given: a plain daemon never hears of an extension.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

from collimate_ray.errors import ConfigError, shown
from collimate_ray.sandbox import wire
from collimate_ray.seeds import is_valid_seed

Json = dict[str, Any]


def exec_body(
    *,
    command: str | None = None,
    code: str | None = None,
    commands: Sequence[Sequence[str]] | None = None,
    files: Sequence[Mapping[str, str]] | None = None,
    timeout_seconds: int = wire.DEFAULT_TIMEOUT_S,
    seed: str | None = None,
    limits: Mapping[str, float] | None = None,
    stdin: bytes | None = None,
    exec_id: str | None = None,
) -> Json:
    """Make the body of an exec; arguments as those of ``SandboxClient.exec_once``.

    Raises:
        ConfigError: One of them is wrong.
    """
    if command is None and code is None and commands is None:
        raise ConfigError("exec: expected one of command, commands or code, found none")
    whole = type(timeout_seconds) is int and 1 <= timeout_seconds <= wire.MAX_TIMEOUT_S
    check_argument("timeout_seconds", timeout_seconds, whole, f"a whole number in 1..{wire.MAX_TIMEOUT_S}")
    check_argument("seed", seed, seed is None or is_valid_seed(seed), "64 hex characters")
    return given(
        command=command,
        code=code,
        commands=None if commands is None else [list(argv) for argv in commands],
        files=[dict(file) for file in files] if files else None,
        timeout_seconds=timeout_seconds,
        seed=seed,
        limits=None if limits is None else dict(limits),
        stdin_b64=None if stdin is None else base64.b64encode(stdin).decode("ascii"),
        id=exec_id,
    )


def given(**fields: Any) -> Json:
    """Keep the fields that are not None."""
    return {name: value for name, value in fields.items() if value is not None}


def check_argument(name: str, value: object, good: bool, expected: str) -> None:
    """Refuse an argument that is not good.

    Raises:
        ConfigError: It names the argument, what was found and what was expected.
    """
    if not good:
        raise ConfigError(f"{name}: expected {expected}, found {shown(value)}")
