"""Fixtures of all tests. Must run before Ray is imported: it sets the environment of the whole run.

The run has a temporary directory of its own: sockets, daemons and Ray sessions of other runs on the same machine are
never met, and what is left behind can be told from theirs.
"""

from __future__ import annotations

import gzip
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest


def _isolate() -> Path:
    """Give this run a temporary directory and a Ray of its own; the path is short for the sake of unix sockets."""
    root = Path(tempfile.mkdtemp(prefix="ct", dir="/tmp"))
    for name in [name for name in os.environ if name.startswith("COLLIMATE_") and name != "COLLIMATE_TEST_DATA"]:
        del os.environ[name]
    os.environ.pop("RAY_ADDRESS", None)
    token = root / "ray_token"
    token.write_text(secrets.token_hex(32))
    token.chmod(0o600)
    (root / "r").mkdir()
    # else a local cluster writes a token to the home directory, and worker nodes can't join (notes: RAY)
    os.environ.update(
        TMPDIR=str(root), RAY_TMPDIR=str(root / "r"), RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH=str(token)
    )
    tempfile.tempdir = None
    return root


ROOT = _isolate()

from leftovers import Watch  # noqa: E402

from collimate_ray.config import runtime_dir  # noqa: E402


def pytest_unconfigure() -> None:
    shutil.rmtree(ROOT, ignore_errors=True)


@pytest.fixture(autouse=True)
def no_leftovers(request: pytest.FixtureRequest) -> Iterator[Watch]:
    """Fail a test that leaves a process, descriptor, socket, file, directory or thread of ours.

    Fixtures of wider scope are set up before it and so are in the baseline. ``no_leftovers.rebase()`` takes what is
    there as given.
    """
    watch = Watch(ROOT, runtime_dir())
    yield watch
    left = watch.left()
    if left:
        pytest.fail(f"{request.node.name} left behind:\n" + "\n".join(left), pytrace=False)


@dataclass(frozen=True)
class ServedDaemon:
    """A daemon of the embedded kind that runs for the whole test session."""

    socket: str
    pid: int


@pytest.fixture(scope="session")
def daemon() -> Iterator[ServedDaemon]:
    """A real embedded daemon on a unix socket."""
    path = runtime_dir() / "tests" / "serve.sock"
    command = [sys.executable, "-m", "collimate_ray", "serve", "--socket", str(path), "--json"]
    with (
        open(ROOT / "daemon.log", "wb") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, stdin=subprocess.DEVNULL) as process,
    ):
        try:
            assert process.stdout is not None
            first = process.stdout.readline()
            assert first, f"the daemon did not start:\n{(ROOT / 'daemon.log').read_text()}"
            yield ServedDaemon(json.loads(first)["socket"], process.pid)
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(timeout=30)
            finally:
                process.kill()


def _test_data() -> Path:
    folder = os.environ.get("COLLIMATE_TEST_DATA")
    if not folder:
        pytest.skip("COLLIMATE_TEST_DATA is not set: no shared test data here")
    return Path(folder)


@pytest.fixture(scope="session")
def humaneval_path() -> Path:
    """HumanEval as published, gzipped JSONL."""
    path = _test_data() / "humaneval" / "HumanEval.jsonl.gz"
    if not path.is_file():
        pytest.skip(f"no {path}")
    return path


@pytest.fixture(scope="session")
def humaneval(humaneval_path: Path) -> list[dict[str, Any]]:
    """The rows of HumanEval: task_id, prompt, entry_point, canonical_solution, test."""
    with gzip.open(humaneval_path, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


@pytest.fixture(scope="session")
def cases() -> dict[str, dict[str, Any]]:
    """The shared grading cases, by name."""
    folder = _test_data().parent / "cases"
    paths = sorted(folder.glob("*.json"))
    if not paths:
        pytest.skip(f"no cases in {folder}")
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in paths}
