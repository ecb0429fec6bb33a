"""What the environment says, and where our sockets live. The only reader of environment variables.

Must not decide: explicit arguments win over what is read here, defaults come after it. Names are those of
design/WIRE.md ("Which transport") and design/API.md ("Environment").
"""

from __future__ import annotations

import os
import stat
import sysconfig
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from collimate_ray.errors import ConfigError


@dataclass(frozen=True)
class Environment:
    """What the ``COLLIMATE_*`` variables say; an unset or empty one is None.

    Attributes:
        serve_socket: ``COLLIMATE_SERVE_SOCKET``, path of a daemon's unix socket.
        api_key: ``COLLIMATE_API_KEY``, key of the gateway.
        base_url: ``COLLIMATE_BASE_URL``, origin of the gateway.
        serve_url: ``COLLIMATE_SERVE_URL``, URL of a daemon.
        template: ``COLLIMATE_TEMPLATE``, template id for specs that name none.
        slots: ``COLLIMATE_SLOTS``, execs in flight on one node, at least 1.
        require_tier: ``COLLIMATE_REQUIRE_TIER``, isolation tier below which nothing is graded.
        max_landlock_abi: ``COLLIMATE_MAX_LANDLOCK_ABI``, the newest Landlock that the daemon uses, 0 or more.
    """

    serve_socket: str | None = None
    api_key: str | None = None
    base_url: str | None = None
    serve_url: str | None = None
    template: str | None = None
    slots: int | None = None
    require_tier: str | None = None
    max_landlock_abi: int | None = None


def read_environment(environ: Mapping[str, str] | None = None) -> Environment:
    """Read the ``COLLIMATE_*`` variables.

    Args:
        environ: Where to read; the process's own environment by default.

    Raises:
        ConfigError: ``COLLIMATE_SLOTS`` or ``COLLIMATE_MAX_LANDLOCK_ABI`` is no whole number in its range.
    """
    source = os.environ if environ is None else environ
    return Environment(
        serve_socket=source.get("COLLIMATE_SERVE_SOCKET") or None,
        api_key=source.get("COLLIMATE_API_KEY") or None,
        base_url=source.get("COLLIMATE_BASE_URL") or None,
        serve_url=source.get("COLLIMATE_SERVE_URL") or None,
        template=source.get("COLLIMATE_TEMPLATE") or None,
        slots=_whole("COLLIMATE_SLOTS", source.get("COLLIMATE_SLOTS"), 1),
        require_tier=source.get("COLLIMATE_REQUIRE_TIER") or None,
        max_landlock_abi=_whole("COLLIMATE_MAX_LANDLOCK_ABI", source.get("COLLIMATE_MAX_LANDLOCK_ABI"), 0),
    )


def _whole(name: str, text: str | None, least: int) -> int | None:
    if not text:
        return None
    # six digits are more slots than any machine has, and keep int() within its own limit on digits
    if not (text.isascii() and text.isdigit() and len(text) <= 6 and int(text) >= least):
        raise ConfigError(f"{name}: expected a whole number of at least {least}, found {text!r}")
    return int(text)


def runtime_dir() -> Path:
    """Give this user's private directory for sockets and locks, made if it is not there.

    Returns:
        ``<tmp>/collimate-<uid>``, mode 0700, owned by us.

    Raises:
        ConfigError: The path is another user's, no directory, or can't be made. Anybody can make names in
            ``<tmp>``, so a socket found in a directory of somebody else must never be talked to.
    """
    path = Path(tempfile.gettempdir()) / f"collimate-{os.getuid()}"
    private_dir(path)
    return path


def private_dir(path: Path) -> None:
    """Make ``path`` a directory of ours with mode 0700, or check that it is one.

    Raises:
        ConfigError: It is a link, no directory, another user's, or can't be made.
    """
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        found = path.lstat()
        ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
        if ours and stat.S_IMODE(found.st_mode) != 0o700:
            path.chmod(0o700)
    except OSError as error:
        raise ConfigError(
            f"runtime directory: expected a private directory at {path}, found: {error.strerror}"
        ) from error
    if not ours:
        raise ConfigError(
            f"runtime directory: expected {path} to be a directory of uid {os.getuid()}, "
            f"found {stat.filemode(found.st_mode)} of uid {found.st_uid}"
        )


#: Variables that a detached daemon keeps. Others may be secrets of the trainer, and what the daemon holds a sandboxed
#: program may come to see.
_DAEMON_KEEPS = (
    "HOME",
    "LANG",
    "LC_ALL",
    "LC_CTYPE",
    "LD_LIBRARY_PATH",
    "PATH",
    "PYTHONHOME",
    "PYTHONPATH",
    "TMPDIR",
    "VIRTUAL_ENV",
    "COLLIMATE_SLOTS",
    "COLLIMATE_REQUIRE_TIER",
    "COLLIMATE_MAX_LANDLOCK_ABI",
)


def daemon_environment(package_root: Path) -> dict[str, str]:
    """Give the environment of a daemon of ours: a few of our own variables, and the way to our package.

    Args:
        package_root: Folder that holds the package. It is put on ``PYTHONPATH`` unless Python looks there anyway:
            an uninstalled checkout must start its own daemon.
    """
    kept = {name: os.environ[name] for name in _DAEMON_KEEPS if name in os.environ}
    if str(package_root) not in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib")):
        kept["PYTHONPATH"] = os.pathsep.join(filter(None, (str(package_root), kept.get("PYTHONPATH"))))
    return kept
