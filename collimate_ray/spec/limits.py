"""Limits of a candidate: names, defaults, checks and which of several wins. Source: design API, limits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from collimate_ray.errors import SpecError

#: Defaults; ``wall_time_s`` is 3 * time_s + 10 and ``total_time_s`` none where nobody says.
DEFAULTS: dict[str, float] = {
    "time_s": 10,
    "memory_mib": 1024,
    "output_mib": 16,
    "processes": 64,
    "files": 256,
    "file_mib": 64,
}

#: Every name of a limit, with its unit in it.
NAMES = ("time_s", "wall_time_s", "total_time_s", "memory_mib", "output_mib", "processes", "files", "file_mib")

#: Counted in whole units.
_WHOLE = ("memory_mib", "output_mib", "processes", "files", "file_mib")


def checked_limits(limits: Any, field: str = "limits") -> dict[str, float]:
    """Check a mapping of limits.

    Args:
        limits: ``{name: number}``, names of ``NAMES``; seconds, MiB and counts above 0.
        field: What to call it in an error.

    Returns:
        A plain copy.

    Raises:
        SpecError: A name is unknown or a number is not above 0.
    """
    if not isinstance(limits, Mapping):
        raise SpecError(f"{field}: expected an object of limits, found {type(limits).__name__}")
    for name, value in limits.items():
        if name not in NAMES:
            raise SpecError(f"{field}: unknown limit {name!r}; known are {', '.join(NAMES)}")
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e9:
            raise SpecError(f"{field}.{name}: expected a number above 0, found {value!r}")
        if name in _WHOLE and value != int(value):
            raise SpecError(f"{field}.{name}: expected a whole number, found {value!r}")
    return dict(limits)


def effective_limits(*layers: Mapping[str, float] | None) -> dict[str, float]:
    """Lay limits over the defaults, later layers over earlier ones.

    Returns:
        All limits but ``total_time_s``, which is there only if a layer has it.
    """
    merged = dict(DEFAULTS)
    for layer in layers:
        merged.update(layer or {})
    merged.setdefault("wall_time_s", 3 * merged["time_s"] + 10)
    return {name: int(value) if name in _WHOLE else value for name, value in merged.items()}
