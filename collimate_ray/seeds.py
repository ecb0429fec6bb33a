"""Seeds of a group: vanilla, common random numbers (crn), deterministic. Pure, but for the host's entropy.

A seed is 64 hex characters (32 bytes), the form in which an exec takes it (design: the control-plane wire). Names and
meanings are those of the published ``collimate_rl`` SDK, so that its users change an import.
"""

from __future__ import annotations

import hashlib
import re
import secrets

from collimate_ray.errors import ConfigError

#: The seed of the deterministic mode: any fixed value would do, this one is the SDK's.
DET_SEED = "deadbeef" * 8

#: How the seeds of a group's members relate.
MODES = ("vanilla", "crn", "deterministic")

_HEX64 = re.compile(r"[0-9a-fA-F]{64}\Z")


def fresh_seed() -> str:
    """Draw a seed from the host's entropy.

    Returns:
        64 hex characters.
    """
    return secrets.token_hex(32)


def is_valid_seed(seed: object) -> bool:
    """Tell whether ``seed`` is a string of exactly 64 hex characters."""
    return isinstance(seed, str) and _HEX64.match(seed) is not None


def seed_from_key(key: str, salt: str = "") -> str:
    """Derive a stable seed from a key: the same key and salt give the same seed, for ever.

    Args:
        key: Any text that identifies a prompt, such as its uid.
        salt: Shifts the whole mapping, for example once an epoch.

    Returns:
        64 hex characters: SHA-256 of salt, NUL, key, as UTF-8.
    """
    return hashlib.sha256(f"{salt}\0{key}".encode("utf-8", "surrogatepass")).hexdigest()


def group_seeds(n: int, mode: str = "crn", base_seed: str | None = None) -> list[str | None]:
    """Give the seeds of a group's ``n`` members.

    Args:
        n: Members of the group, at least 0.
        mode: ``"vanilla"``: each member draws its own (None here); ``"crn"``: one fresh seed for all;
            ``"deterministic"``: ``DET_SEED`` for all.
        base_seed: The shared seed of ``crn`` and ``deterministic``; unused by ``vanilla``.

    Returns:
        Seeds, shape (n,), each 64 hex characters or None.

    Raises:
        ConfigError: n is negative, the mode is unknown or the base seed is not 64 hex characters.
    """
    if n < 0:
        raise ConfigError(f"n: expected 0 or more, found {n}")
    if mode not in MODES:
        raise ConfigError(f"mode: expected one of {', '.join(MODES)}, found {mode!r}")
    if mode == "vanilla":
        return [None] * n
    seed = base_seed or (DET_SEED if mode == "deterministic" else fresh_seed())
    if not is_valid_seed(seed):
        raise ConfigError(f"base_seed: expected 64 hex characters, found {seed!r}")
    return [seed] * n
