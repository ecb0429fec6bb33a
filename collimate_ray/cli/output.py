"""The OUT file: one JSON line a group, whole or not there. Must not keep results in memory.

A line goes out in one write, so that whoever stops the run, or reads along, never finds half a line; where
the disk fills up in the middle, the half is cut off again.
"""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

from collimate_ray.cli.errors import InputError, OutputLost
from collimate_ray.cli.inputs import STDIN
from collimate_ray.results import GroupResult


class OutFile:
    """OUT, opened for writing. What it held stays until ``begin``: a run that can't start destroys nothing.

    Args:
        path: Where to write; its directory must be there.
        inputs: Files that are read; OUT must be none of them.

    Raises:
        InputError: OUT can't be written, or is an input.
    """

    def __init__(self, path: str, *inputs: str) -> None:
        self.path = path
        #: lines written since ``begin``
        self.lines = 0
        self._new = not os.path.lexists(path)
        for name in inputs:
            if name != STDIN and os.path.exists(path) and os.path.samefile(name, path):
                raise InputError([f"--out: expected a file of its own, found {path}, which is the input {name}"])
        try:
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise InputError([f"--out: expected a file that can be written, found {path}: {error.strerror}"]) from None
        self._regular = _is_regular(self._fd)

    def begin(self) -> None:
        """Drop what the file held before."""
        if self._regular:
            os.ftruncate(self._fd, 0)

    def write(self, record: dict[str, Any]) -> None:
        """Write one line.

        Raises:
            OutputLost: It could not be written; no part of it stays.
        """
        data = json.dumps(record).encode("ascii") + b"\n"
        start = os.fstat(self._fd).st_size
        try:
            whole = os.write(self._fd, data) == len(data)
        except OSError as error:
            self._cut(start)
            raise OutputLost(f"--out: cannot write {self.path}: {error.strerror}") from None
        if not whole:
            self._cut(start)
            raise OutputLost(f"--out: cannot write {self.path}: the disk is full")
        self.lines += 1

    def _cut(self, size: int) -> None:
        if self._regular:
            os.ftruncate(self._fd, size)

    def close(self) -> None:
        """Close the file; one that we made and never wrote to is removed."""
        os.close(self._fd)
        if self._new and self._regular and self.lines == 0:
            Path(self.path).unlink(missing_ok=True)


def _is_regular(fd: int) -> bool:
    return stat.S_ISREG(os.fstat(fd).st_mode)


def group_record(row_id: str, group: GroupResult) -> dict[str, Any]:
    """Give the OUT line of a group: ``{"id", "rewards", "valid", "results"}``.

    Args:
        row_id: The row's id.
        group: Its result, shape (G,).

    Returns:
        JSON-able; rewards are 0.0 where not valid, as in ``GroupResult``.
    """
    return {
        "id": row_id,
        "rewards": [r.reward if r.valid and r.reward is not None else 0.0 for r in group.results],
        "valid": [bool(r.valid) for r in group.results],
        "results": [r.to_dict() for r in group.results],
    }
