"""Whether a daemon's isolation is good enough. Pure. Source: design/DESIGN.md and notes/SANDBOX.md ("Tiers").

Must not choose a tier: the daemon does that, by trial.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from collimate_ray.errors import ConfigError
from collimate_ray.sandbox.body import check_argument
from collimate_ray.sandbox.wire import TIERS


def checked_tier(wanted: str | None) -> str | None:
    """Give the name of a tier back, or None.

    Raises:
        ConfigError: There is no such tier.
    """
    check_argument("require_tier", wanted, wanted is None or wanted in TIERS, f"one of {', '.join(TIERS[::-1])}")
    return wanted


def check_tier(health: Mapping[str, Any], wanted: str | None, where: str) -> None:
    """Check that a daemon has at least the wanted tier.

    Args:
        health: What it says of itself; a daemon that names no tier of ours has none.
        wanted: One of ``TIERS``, or None: any will do.
        where: The daemon's address, for people.

    Raises:
        ConfigError: Its tier is lower, or ``wanted`` is none.
    """
    if checked_tier(wanted) is None:
        return
    found = health.get("tier")
    if found not in TIERS or TIERS.index(found) < TIERS.index(str(wanted)):
        raise ConfigError(f"require_tier: expected a daemon of tier {wanted!r} or better, found {found!r} at {where}")
