"""Bytes into and out of a session, by base64 over exec, verified by size and SHA-256. Source: design/WIRE.md.

``files`` of the wire carry text only, and real daemons add a missing final newline. Needs ``base64``, ``sha256sum``,
``head``, ``tail`` and ``wc`` in the session. Must not be used for grading: it is several execs a file.
"""

from __future__ import annotations

import base64
import hashlib
import secrets
import shlex

from collimate_ray.errors import ConfigError, WireError
from collimate_ray.sandbox import wire
from collimate_ray.sandbox.client import SandboxClient

#: Bytes of a file in one command: 96 KiB of base64, as the kernel takes no string over 128 KiB for ``sh -c``.
UPLOAD_CHUNK_BYTES = 96 * 1024 * 3 // 4

#: Bytes of a file in one answer: with base64 and its line ends well under the 16 MiB that an exec may print.
DOWNLOAD_CHUNK_BYTES = 6 << 20

#: What the shell prints where there is no such file.
_ABSENT = "collimate-no-such-file"


def upload(
    client: SandboxClient,
    session_id: str,
    path: str,
    data: bytes,
    *,
    timeout_seconds: int = wire.DEFAULT_TIMEOUT_S,
) -> None:
    """Write a file in a session: it is there whole, or as it was before.

    Args:
        client: Client of the session's daemon.
        session_id: The session.
        path: Where to; parents are made. Relative to the session's working directory.
        data: The file's bytes.
        timeout_seconds: Time of each of the execs, s, 1..3600.

    Raises:
        ConfigError: The path is empty or has a NUL.
        WireError: What arrived is not what was sent, or the session has no ``base64`` or ``sha256sum``.
        InfraError: As for ``session_exec``.
    """
    target = _quoted(path)
    part = _quoted(f"{path}.part-{secrets.token_hex(4)}")
    commands = [f'mkdir -p -- "$(dirname -- {target})" && : > {part}']
    for start in range(0, len(data), UPLOAD_CHUNK_BYTES):
        text = base64.b64encode(data[start : start + UPLOAD_CHUNK_BYTES]).decode("ascii")
        commands.append(f"printf %s {text} | base64 -d >> {part}")
    for command in commands:
        _run(client, session_id, command, f"upload {path!r}", timeout_seconds)
    _compare(f"upload {path!r}", _measured(client, session_id, part, path, timeout_seconds), data)
    _run(client, session_id, f"mv -f -- {part} {target}", f"upload {path!r}", timeout_seconds)


def download(
    client: SandboxClient,
    session_id: str,
    path: str,
    *,
    timeout_seconds: int = wire.DEFAULT_TIMEOUT_S,
) -> bytes:
    """Read a file of a session.

    Args:
        client: Client of the session's daemon.
        session_id: The session.
        path: The file, relative to the session's working directory.
        timeout_seconds: Time of each of the execs, s, 1..3600.

    Raises:
        ConfigError: There is no such file that can be read, or the path is empty or has a NUL.
        WireError: What arrived is not what the file holds, for instance because it changed meanwhile.
        InfraError: As for ``session_exec``.
    """
    source = _quoted(path)
    what = f"download {path!r}"
    measured = _measured(client, session_id, source, path, timeout_seconds)
    parts: list[bytes] = []
    for start in range(0, measured[0], DOWNLOAD_CHUNK_BYTES):
        command = f"tail -c +{start + 1} -- {source} | head -c {DOWNLOAD_CHUNK_BYTES} | base64"
        parts.append(_decoded(what, _run(client, session_id, command, what, timeout_seconds)))
    data = b"".join(parts)
    _compare(what, measured, data)
    return data


def _quoted(path: str) -> str:
    if not path or "\0" in path:
        raise ConfigError(f"path: expected a path without NUL, found {path!r}")
    # a leading dash would be an option to some tool
    return shlex.quote(path if path[0] != "-" else f"./{path}")


def _measured(client: SandboxClient, session_id: str, quoted: str, path: str, timeout_seconds: int) -> tuple[int, str]:
    """Give size and SHA-256 of a session's file, as the session sees them."""
    command = (
        f"if [ -f {quoted} ] && [ -r {quoted} ]; then wc -c < {quoted} && sha256sum < {quoted}; else echo {_ABSENT}; fi"
    )
    words = _run(client, session_id, command, f"size of {path!r}", timeout_seconds).split()
    if words == [_ABSENT]:
        raise ConfigError(f"path: expected a file in the session, found none that can be read: {path!r}")
    if len(words) < 2 or not words[0].isdecimal():
        raise WireError(f"size of {path!r}: expected a size and a SHA-256, found {' '.join(words)[:200]!r}")
    return int(words[0]), words[1]


def _compare(what: str, measured: tuple[int, str], data: bytes) -> None:
    ours = (len(data), hashlib.sha256(data).hexdigest())
    if measured != ours:
        raise WireError(f"{what}: the session's file has size and SHA-256 {measured}, ours has {ours}")


def _decoded(what: str, text: str) -> bytes:
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except ValueError as error:
        raise WireError(f"{what}: expected base64, found {text[:200]!r}") from error


def _run(client: SandboxClient, session_id: str, command: str, what: str, timeout_seconds: int) -> str:
    answer = client.session_exec(session_id, command=command, timeout_seconds=timeout_seconds)
    output = str(answer["stdout"])
    if answer["exit_code"] != 0:
        raise WireError(f"{what}: exit code {answer['exit_code']}: {output[:200]!r}")
    return output
