"""After thousands of execs, a tenth of them hostile, nothing is left but what was there (benchmarks/endurance.py)."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root sees the descriptors of a non-dumpable process")


@pytest.fixture(scope="module")
def endurance():
    path = Path(__file__).parent.parent / "benchmarks" / "endurance.py"
    spec = importlib.util.spec_from_file_location("endurance", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["endurance"] = module  # its dataclasses look there
    spec.loader.exec_module(module)
    yield module
    del sys.modules["endurance"]


def test_nothing_grows(endurance):
    lines = []
    assert endurance.endure(5000, 8, lines.append) == [], "\n".join(lines)


def test_what_is_left_is_seen(endurance, tmp_path):
    with endurance.served(str(tmp_path), 1) as (socket, pid):
        census = endurance.Census(pid, str(tmp_path))
        before = endurance.settle(socket, census, None)
        (tmp_path / "d" / "left").touch()
        environment = {"COLLIMATE_EXEC_ID": census.mark}
        with subprocess.Popen(["unshare", "--mount", "sleep", "600"], env=environment) as orphan:
            try:
                # until both exec calls are done it is in our own mount namespace, which is no new one
                while endurance._namespace(orphan.pid) in ("", endurance._namespace(os.getpid())):
                    assert orphan.poll() is None
                after = census.counts()
            finally:
                orphan.kill()
    assert endurance.grown(before, after) == ["processes", "mount namespaces", "files of the daemon"]


def test_wrong_answers_are_told(endurance):
    tally = endurance.Tally()
    tally.add(1, {"status": "ok", "stdout": "1\n"})
    assert tally.wrong == []
    tally.add(1, {"status": "ok", "stdout": ""})
    tally.add(1, {"status": "signal", "stdout": "1\n"})
    tally.add(0, {"status": "ok", "stdout": ""})
    assert [line.split(":")[0] for line in tally.wrong] == ["exec 1 (honest)", "exec 1 (honest)", "exec 0 (spins)"]
