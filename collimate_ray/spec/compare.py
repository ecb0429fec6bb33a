"""The pure comparison of answers with expectations, on plain decoded values and on text.

No method of a candidate's object can run here: values are rebuilt from their encoding. Walks are iterative. Rules
(design: cases, Conventions): a tuple equals a list, 1 equals 1.0, floats to a tolerance, integers exactly (a float that
answers an integer may be off by its own rounding), dict keys as JSON writes them, NaN equals nothing.
"""

from __future__ import annotations

import math
import re
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np

from collimate_ray.errors import SpecError

#: Tolerance of floats, absolute and relative to the expected value.
FLOAT_TOLERANCE = 1e-6

#: How far a float may be from an expected integer, relative: a few roundings. A candidate chooses how it writes its
#: answer, so the tolerance of floats would make every large integer approximate.
ROUNDING = 1e-12

_INTEGER = re.compile(r"[+-]?\d+\Z")
_REAL = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?\Z")


@dataclass(frozen=True)
class Tolerance:
    """How far floats may be apart: absolute, or relative to the expected value; the wider holds."""

    abs: float = FLOAT_TOLERANCE
    rel: float = FLOAT_TOLERANCE

    def close(self, expected: float, got: float) -> bool:
        """Compare two finite numbers; equal infinities are equal, NaN is not."""
        if not (math.isfinite(expected) and math.isfinite(got)):
            return expected == got
        return abs(got - expected) <= max(self.abs, self.rel * abs(expected))

    def of_integer(self) -> Tolerance:
        """Give the tolerance where an integer is expected and a float is the answer."""
        return Tolerance(self.abs, min(self.rel, ROUNDING)) if self.rel == FLOAT_TOLERANCE else self


def values_equal(expected: Any, got: Any, tolerance: Tolerance) -> bool:
    """Compare plain values of any depth."""
    work = [(expected, got)]
    while work:
        pairs = _children(*work.pop(), tolerance)
        if pairs is None:
            return False
        work += pairs
    return True


def _children(expected: Any, got: Any, tolerance: Tolerance) -> list[tuple[Any, Any]] | None:
    """Compare one level: None if it differs, else the pairs to compare below it."""
    expected, got = _plain(expected), _plain(got)
    if isinstance(expected, list | tuple | deque):
        other = deque if isinstance(expected, deque) else list | tuple
        if not isinstance(got, other) or len(expected) != len(got):
            return None
        return list(zip(expected, got, strict=True))
    if isinstance(expected, dict):
        return _dict_pairs(expected, got) if isinstance(got, dict) else None
    return [] if _leaves_equal(expected, got, tolerance) else None


def _plain(value: Any) -> Any:
    """Turn numpy values into Python's."""
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value


def _dict_pairs(expected: dict[Any, Any], got: dict[Any, Any]) -> list[tuple[Any, Any]] | None:
    named = {_json_key(_plain(key)): value for key, value in got.items()}
    if len(named) != len(got) or len(expected) != len(got):
        return None
    if any(_json_key(key) not in named for key in expected):
        return None
    return [(value, named[_json_key(key)]) for key, value in expected.items()]


def _json_key(key: Any) -> Any:
    """Give a key as JSON would write it."""
    if key is None or isinstance(key, bool):
        return {None: "null", True: "true", False: "false"}[key]
    if isinstance(key, int):
        return hex(key) if abs(key) >> 64 else str(key)  # decimal text of huge integers is quadratic
    return repr(key) if isinstance(key, float) else key


def _leaves_equal(expected: Any, got: Any, tolerance: Tolerance) -> bool:
    if isinstance(expected, int | float) and isinstance(got, int | float):
        if isinstance(expected, int) and isinstance(got, int):
            return expected == got
        allowed = tolerance.of_integer() if isinstance(expected, int) else tolerance
        try:
            return allowed.close(float(expected), float(got))
        except OverflowError:  # an integer beyond every float
            return False
    if isinstance(expected, complex) or isinstance(got, complex):
        numbers = all(isinstance(side, int | float | complex) for side in (expected, got))
        return numbers and (expected == got or tolerance.close(0.0, abs(expected - got)))
    alike = type(expected) is type(got) or all(isinstance(side, bytes | bytearray) for side in (expected, got))
    return alike and bool(expected == got)


def texts_equal(expected: str, got: str, tolerance: Tolerance) -> bool:
    """Compare two texts line by line, tokens per line; blank lines at either end do not count."""
    lines, found = _lines(expected), _lines(got)
    return len(lines) == len(found) and all(
        _lines_equal(line, other, tolerance) for line, other in zip(lines, found, strict=True)
    )


def _lines(text: str) -> list[str]:
    """Split at newlines, drop blank lines at both ends."""
    lines = text.replace("\r\n", "\n").split("\n")
    kept = [i for i, line in enumerate(lines) if line.strip()]
    return lines[kept[0] : kept[-1] + 1] if kept else []


def _lines_equal(expected: str, got: str, tolerance: Tolerance) -> bool:
    if expected == got:
        return True
    tokens, found = expected.split(), got.split()
    return len(tokens) == len(found) and all(
        a == b or _numbers_equal(a, b, tolerance) for a, b in zip(tokens, found, strict=True)
    )


def _numbers_equal(expected: str, got: str, tolerance: Tolerance) -> bool:
    """Compare two tokens as numbers: integers as normalised text (never through ``int``), others to a tolerance."""
    if _INTEGER.match(expected) and _INTEGER.match(got):
        return _normal_integer(expected) == _normal_integer(got)
    if not (_REAL.match(expected) and _REAL.match(got)):
        return False
    allowed = tolerance.of_integer() if _INTEGER.match(expected) else tolerance
    return allowed.close(float(expected), float(got)) and math.isfinite(float(got))


def _normal_integer(token: str) -> str:
    digits = token.lstrip("+-").lstrip("0") or "0"
    return "-" + digits if token.startswith("-") and digits != "0" else digits


@dataclass(frozen=True)
class Checker:
    """A named comparison.

    Attributes:
        name: ``values``, ``tokens``, ``exact`` or ``float``.
        tolerance: Of floats.
    """

    name: str
    tolerance: Tolerance = Tolerance()

    def values(self, expected: Any, got: Any) -> bool:
        """Compare two plain values."""
        if self.name == "exact":
            return values_equal(expected, got, Tolerance(0.0, 0.0))
        return values_equal(expected, got, self.tolerance)

    def texts(self, expected: str, got: str) -> bool:
        """Compare two outputs."""
        return expected == got if self.name == "exact" else texts_equal(expected, got, self.tolerance)


#: Checkers of each kind of spec, the default first.
CHECKERS = {"unit_tests": ("values", "exact", "float"), "stdin_stdout": ("tokens", "exact", "float")}


def checker_from(value: Any, kind: str) -> Checker:
    """Make a checker from its JSON: a name, or ``{"name": "float", "abs": 1e-6, "rel": 1e-6}``.

    Raises:
        SpecError: The name is unknown for this kind, or an option is.
    """
    options = dict(value) if isinstance(value, dict) else {"name": value}
    name = options.pop("name", None)
    if name not in CHECKERS[kind]:
        raise SpecError(f"checker: expected one of {', '.join(CHECKERS[kind])}, found {name!r}")
    if options and (name != "float" or not set(options) <= {"abs", "rel"}):
        raise SpecError(f"checker: unknown options {sorted(options)} of {name!r}; only float has some: abs, rel")
    for option, number in options.items():
        if isinstance(number, bool) or not isinstance(number, int | float) or not 0 <= number < 1e9:
            raise SpecError(f"checker.{option}: expected a number of 0 or more, found {number!r}")
    return Checker(name, Tolerance(**options))
