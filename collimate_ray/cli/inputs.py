"""Rows of ``collimate-ray grade`` from JSON lines: every line is checked before anything starts.

A row is ``{"id", "spec", "completions": [...], "limits"?, "seed"?}`` (design API). Must not start anything,
and must not stop at the first wrong line: all are read, each gives its own problem. Source of the format:
the project's API page.
"""

from __future__ import annotations

import gzip
import json
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from collimate_ray.cli.errors import InputError
from collimate_ray.errors import SpecError
from collimate_ray.seeds import is_valid_seed
from collimate_ray.spec import RewardSpec, spec_from_dict
from collimate_ray.spec.limits import checked_limits

#: The name that stands for standard input.
STDIN = "-"

_ROW_KEYS = ("id", "spec", "completions", "limits", "seed")
_NEEDED_KEYS = ("id", "spec", "completions")
#: Characters of a found value that are shown: enough to recognise it, short enough for one line.
_SHOWN_CHARS = 40

T = TypeVar("T")


@dataclass(frozen=True)
class Row:
    """One group to grade.

    Attributes:
        id: The group's name, unique in its file.
        spec: What to run and how to judge it.
        completions: Model texts, shape (G,), G >= 1.
        limits: Limits that win over the spec's, by name.
        seed: 64 hex characters for all members, or None: as ``--seeds`` says.
    """

    id: str
    spec: RewardSpec
    completions: tuple[str, ...]
    limits: Mapping[str, float] | None = None
    seed: str | None = None


class Problem(Exception):
    """One thing that is wrong with one line; its text is ``field: found, expected``."""


class WrongFormat(Problem):
    """The whole file is of another format: what is wrong with each of its lines is no news."""


def shown(value: object) -> str:
    """Give a found value in short, on one line, in ASCII."""
    text = ascii(value)
    return text if len(text) <= _SHOWN_CHARS else text[: _SHOWN_CHARS - 3] + "..."


def expect(ok: bool, name: str, expected: str, value: object) -> None:
    """Raise Problem unless ``ok``: the field, what was expected, what was found."""
    if not ok:
        raise Problem(f"{name}: expected {expected}, found {shown(value)}")


def read_bytes(path: str) -> bytes:
    """Read a file, or standard input for ``-``; gzip is known by its first bytes.

    Raises:
        InputError: It is not there, not a file, not readable, or broken gzip.
    """
    try:
        data = sys.stdin.buffer.read() if path == STDIN else Path(path).read_bytes()
        return gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or f"broken gzip data ({error})"
        raise InputError([f"{path}: cannot be read: {reason}"]) from None


def read_objects(path: str, make: Callable[[dict[str, Any]], T]) -> list[T]:
    """Read JSON lines and make something of each; all lines are tried before anything is raised.

    Args:
        path: A file, plain or gzip, or ``-``. Blank lines are skipped.
        make: Gets the line's object; raises Problem, or SpecError about its spec; after WrongFormat no line is read.

    Raises:
        InputError: Lines are wrong, or there are none.
    """
    made, problems = [], []
    for number, line in _lines(read_bytes(path)):
        try:
            made.append(make(_parse(line)))
        except WrongFormat as problem:
            raise InputError([f"{path}:{number}: {problem}"]) from None
        except Problem as problem:
            problems.append(f"{path}:{number}: {problem}")
        except SpecError as error:
            problems.append(f"{path}:{number}: spec: {error}")
    if not made and not problems:
        problems.append(f"{path}: expected one JSON object a line, found no line")
    if problems:
        raise InputError(problems)
    return made


def _lines(data: bytes) -> Iterator[tuple[int, bytes]]:
    data = data.removeprefix(b"\xef\xbb\xbf")
    for number, line in enumerate(data.split(b"\n"), 1):
        if line.strip():
            yield number, line


def _parse(line: bytes) -> dict[str, Any]:
    try:
        value = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise Problem(f"expected UTF-8, found byte 0x{line[error.start]:02x} at column {error.start + 1}") from None
    except json.JSONDecodeError as error:
        raise Problem(f"expected JSON, found a mistake at column {error.colno}: {error.msg}") from None
    except (ValueError, RecursionError) as error:
        raise Problem(f"expected JSON, found a value that cannot be read: {error}") from None
    expect(isinstance(value, dict), "line", "a JSON object", value)
    return dict(value)


def check_keys(data: Mapping[str, Any], needed: Sequence[str], known: Sequence[str]) -> None:
    """Check that all needed keys are there and no unknown one is."""
    missing = [key for key in needed if key not in data]
    if missing:
        raise Problem(f"{missing[0]}: expected this field, found only {', '.join(map(shown, data)) or 'nothing'}")
    unknown = [key for key in data if key not in known]
    if unknown:
        raise Problem(f"{shown(unknown[0])}: unknown field, expected only {', '.join(known)}")


def read_rows(path: str, template: str | None = None) -> list[Row]:
    """Read the rows of an INPUT file.

    Args:
        path: JSON lines, plain or gzip, or ``-`` for standard input.
        template: Template of specs that name none, or None for the default.

    Returns:
        Rows in the order of the file.

    Raises:
        InputError: Some line is wrong.
    """
    seen: set[str] = set()

    def make(data: dict[str, Any]) -> Row:
        if not seen and data.keys() >= {"task_id", "prompt"}:
            raise WrongFormat("looks like HumanEval: add --format humaneval")
        row = _row(data, template)
        if row.id in seen:
            raise Problem(f"id: expected an id of its own, found {shown(row.id)} a second time")
        seen.add(row.id)
        return row

    return read_objects(path, make)


def _row(data: dict[str, Any], template: str | None) -> Row:
    check_keys(data, _NEEDED_KEYS, _ROW_KEYS)
    expect(isinstance(data["id"], str) and data["id"] != "", "id", "a string that is not empty", data["id"])
    expect(isinstance(data["spec"], dict), "spec", "a JSON object", data["spec"])
    spec = dict(data["spec"])
    if template is not None:
        spec.setdefault("template", template)
    seed = data.get("seed")
    expect(seed is None or is_valid_seed(seed), "seed", "64 hex characters", seed)
    limits = _limits(data.get("limits"))
    return Row(data["id"], spec_from_dict(spec), _completions(data["completions"]), limits, seed)


def _completions(value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or not value:
        raise Problem(f"completions: expected a list of at least one string, found {shown(value)}")
    for index, text in enumerate(value):
        expect(isinstance(text, str), f"completions[{index}]", "a string", text)
    return tuple(value)


def _limits(value: object) -> dict[str, float] | None:
    """Check a row's limits; None and {} mean none of its own."""
    if value is None:
        return None
    try:
        return checked_limits(value) or None
    except SpecError as error:
        raise Problem(str(error)) from None
