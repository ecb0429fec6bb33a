"""Helpers of the command line's tests: the command as a process, as a user runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

#: A whole command with a local cluster, s: it takes some 15 on a quiet machine.
PATIENCE_S = 240

SPEC = {"kind": "unit_tests", "entry": "add", "tests": [{"input": [1, 2], "expected": 3}]}
RIGHT = "```python\ndef add(a, b):\n    return a + b\n```"
WRONG = "```python\ndef add(a, b):\n    return a - b\n```"
LOOP = "```python\ndef add(a, b):\n    while True:\n        pass\n```"


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "collimate_ray", *map(str, arguments)]


def run(*arguments: object, stdin: str = "", env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments),
        input=stdin,
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )


def row(name: str = "a", **changed: Any) -> dict[str, Any]:
    return {"id": name, "spec": SPEC, "completions": [RIGHT, WRONG], **changed}


def write_lines(path: Path, *records: Any) -> Path:
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records))
    return path


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def cluster_directories() -> list[Path]:
    """Directories of local clusters of this test run; none may stay."""
    return list(Path(tempfile.gettempdir()).glob("cr????????"))
