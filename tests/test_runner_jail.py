"""The runner by itself, as a preloaded module: what its candidates stand behind, and a session without ``/proc``."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from collimate_ray.seeds import DET_SEED
from collimate_ray.spec import effective_limits, read_report, runner_source, spec_from_dict

#: Runs a request of standard input; ``FENCE`` is told by what it leaves in the environment.
PROGRAM = """
import os, sys, types
runner = types.ModuleType("collimate_runner")
exec(open(sys.argv[1]).read(), runner.__dict__)
runner.FENCES.append(lambda: os.environ.update(FENCE="%d %d" % (os.getpid(), os.getuid())))
runner.main()
"""
#: A pid namespace of its own, where ``/proc`` is an empty directory.
WITHOUT_PROC = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c"]
WITHOUT_PROC += ['mount -t tmpfs none /proc && exec "$@"', "sh"]


def has_namespaces():
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        return False
    return subprocess.run([*WITHOUT_PROC, "true"], capture_output=True, timeout=60).returncode == 0


@pytest.fixture(params=["proc", "no proc"])
def around(request):
    if request.param == "proc":
        return []
    if not has_namespaces():
        pytest.skip("needs namespaces")
    return WITHOUT_PROC


def run(tmp_path, around, code, inputs=((),), **limits):
    """Call a candidate's ``f`` once for each list of arguments; give the report's records."""
    source = tmp_path / "runner.py"
    source.write_text(runner_source())
    tests = [{"input": list(args), "expected": 0} for args in inputs]
    spec = spec_from_dict({"kind": "unit_tests", "entry": "f", "tests": tests, "scoring": "fraction"})
    request = {
        **spec.request(code, spec.cases()),
        **{"nonce": "n", "seed": DET_SEED, "root_only": False, "limits": effective_limits(limits, None)},
    }
    done = subprocess.run(
        [*around, sys.executable, "-c", PROGRAM, str(source)],
        input=json.dumps(request).encode(),
        capture_output=True,
        timeout=120,
    )
    return read_report(done.stdout.decode(), "n").cases


def test_a_fence_stands_in_the_candidates_process_after_its_change_of_user(tmp_path, around):
    code = "import os\nf = lambda: [os.environ['FENCE'], '%d %d' % (os.getpid(), os.getuid())]"
    (record,) = run(tmp_path, around, code)
    fenced, own = record.value
    assert fenced == own


def test_the_first_code_of_a_candidate_is_behind_the_fence(tmp_path, around):
    (record,) = run(tmp_path, around, "import os\nseen = 'FENCE' in os.environ\ndef f(): return seen")
    assert record.value is True


def test_memory_is_bounded(tmp_path, around):
    code = "def f():\n    bytearray(150 << 20)\n    return bytearray(400 << 20)"
    (record,) = run(tmp_path, around, code, memory_mib=300)
    assert record.status == "memory"
    (record,) = run(tmp_path, around, "def f(): return len(bytearray(250 << 20))", memory_mib=300)
    assert (record.status, record.value) == ("ok", 250 << 20)


def test_a_loop_is_cut_off_by_its_own_time(tmp_path, around):
    (record,) = run(tmp_path, around, "def f():\n    while True: pass", time_s=0.5, wall_time_s=100)
    assert record.status == "timeout"
    assert record.wall_ms < 50_000


def test_a_sleeper_is_cut_off_at_the_latest_by_the_wall(tmp_path, around):
    code = "import time\ndef f(): time.sleep(100)"
    (record,) = run(tmp_path, around, code, time_s=0.5, wall_time_s=1)
    assert record.status == "timeout"


def test_what_a_candidate_leaves_is_swept(tmp_path, around):
    mark = f"0.{os.getpid()}"
    code = (
        "import os\ndef f():\n    if not os.fork():\n        os.setsid()\n"
        f"        if not os.fork(): os.execvp('sleep', ['sleep', '10000{mark}'])\n        os._exit(0)\n    os.wait()\n"
    )
    records = run(tmp_path, around, code, inputs=[(), ()])
    assert [record.status for record in records] == ["ok", "ok"]
    assert subprocess.run(["pgrep", "-f", f"sleep 10000{mark}"], capture_output=True).stdout == b""


def test_every_candidate_draws_anew_whatever_was_forked_before_it(tmp_path, around):
    code = """
import os, random, time, uuid
drawn = [random.random(), uuid.uuid4().hex, os.urandom(8).hex()]
def f(ends):
    if ends:
        if os.fork(): os._exit(1)
        time.sleep(100)
    return drawn
"""
    first, ended, third = run(tmp_path, around, code, inputs=[(0,), (1,), (0,)])
    assert (first.status, ended.status, third.status) == ("ok", "exit", "ok")
    assert first.value == third.value
