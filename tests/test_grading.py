"""The whole of one grade, on the embedded daemon and on a plain one: in-session program, report, judgement."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from collimate_rl.local_backend import LocalCollimateBackend
from golden import GOLDEN, Golden, asserting

from collimate_ray.errors import CheckerError, ConfigError, SandboxUnavailable, SessionLost, SpecError
from collimate_ray.results import Verdict
from collimate_ray.sandbox import SandboxClient
from collimate_ray.sandbox.grading import grade, grade_batch, grade_candidate, prepare_cases
from collimate_ray.seeds import DET_SEED
from collimate_ray.spec import UnitTestReward, read_report, runner_code, spec_from_dict

CUBE = spec_from_dict({"kind": "unit_tests", "entry": "cube", "tests": [{"input": [2], "expected": 8}]})


@pytest.fixture(scope="module")
def backend():
    with LocalCollimateBackend(templates={"python": {"interpreter": sys.executable}}) as backend:
        yield backend


@pytest.fixture
def plain(backend):
    with SandboxClient(backend.base_url) as client:
        yield client


@pytest.fixture
def embedded(daemon):
    with SandboxClient(unix_socket=daemon.socket) as client:
        yield client


@pytest.fixture(params=["plain", "embedded"])
def client(request, plain, embedded):
    return {"plain": plain, "embedded": embedded}[request.param]


def graded(client, golden: Golden):
    return grade(client, "python", golden.code, spec_from_dict(golden.spec), seed=DET_SEED, timeout_seconds=120)


def test_golden_candidates_get_their_verdicts(client):
    with ThreadPoolExecutor(4) as pool:
        results = dict(zip(GOLDEN, pool.map(lambda golden: graded(client, golden), GOLDEN.values()), strict=True))
    wrong = {
        name: (result.verdict, result.reward, dict(result.evidence))
        for name, result in results.items()
        if (result.verdict, result.reward) != (Verdict(GOLDEN[name].verdict), GOLDEN[name].reward)
        or (GOLDEN[name].evidence and GOLDEN[name].evidence not in result.evidence)
    }
    assert not wrong
    assert all(result.valid and result.total > 0 for result in results.values())


def test_shared_cases_get_their_rewards(embedded, cases):
    def reward(case):
        spec = spec_from_dict(case["spec"])
        limits = case.get("limits") or {}
        code = spec.candidate(case["completion"])
        try:
            return grade_candidate(embedded, spec, code, seed=DET_SEED, limits=limits).reward
        except SessionLost:
            return grade_candidate(embedded, spec, code, seed=DET_SEED, limits=limits).reward

    with ThreadPoolExecutor(4) as pool:
        rewards = dict(zip(cases, pool.map(reward, cases.values()), strict=True))
    assert {name: rewards[name] for name in cases} == {name: case["expected_reward"] for name, case in cases.items()}


def test_a_candidate_finds_no_secret_in_its_memory(embedded):
    hunt = """
def f():
    found, needle = [], "se" + "cret-of-the-" + "test"
    with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb", 0) as memory:
        for line in maps:
            span, mode = line.split()[:2]
            low, high = (int(part, 16) for part in span.split("-"))
            if mode.startswith("rw") and high - low < 1 << 28 and "[vv" not in line:
                memory.seek(low)
                try: block = memory.read(high - low)
                except OSError: continue
                at = block.find(needle.encode())
                if at >= 0: found.append(line)
    return len(found) <= 1  # the needle that was just put together
"""
    spec = spec_from_dict(asserting("HIDDEN = 'secret-of-the-test'\nassert f() is True", "f"))
    assert grade_candidate(embedded, spec, hunt, seed=DET_SEED).verdict is Verdict.PASSED


DRAWS = """import os, random, secrets, uuid, numpy
drawn = [random.random(), random.Random().random(), os.urandom(8).hex(), secrets.token_hex(8), uuid.uuid4().hex]
drawn += [float(numpy.random.rand()), float(numpy.random.default_rng().random())]
"""
DRAWING = {
    "unit_tests": (f"def f():\n    exec({DRAWS!r}, globals())\n    return drawn", {"input": [], "expected": 0}),
    "stdin_stdout": (f"{DRAWS}print(*drawn)", {"stdin": "", "stdout": "x"}),
}


@pytest.mark.parametrize("kind", DRAWING)
def test_the_seed_pins_draws_wherever_it_runs(plain, embedded, kind):
    code, test = DRAWING[kind]
    spec = spec_from_dict({"kind": kind, "tests": [test] * 2, **({"entry": "f"} if kind == "unit_tests" else {})})

    def drawn(client, seed):
        result = grade_candidate(client, spec, code, seed=seed)
        assert result.verdict is Verdict.FAILED
        return [case.got for case in result.cases]

    first, other = drawn(plain, DET_SEED), drawn(plain, "ab" * 32)
    assert first == drawn(plain, DET_SEED) == drawn(embedded, DET_SEED)
    values, others = (text[0].strip("[]").replace(",", " ").split() for text in (first, other))
    assert len(values) == len(others) == 7
    assert all(a != b for a, b in zip(values, others, strict=True))


def test_the_seed_pins_what_test_code_draws(client):
    test = f"{DRAWS}assert f(repr(drawn))"
    spec = spec_from_dict(asserting(test, "f"))
    shown = "def f(drawn): raise ValueError(drawn)"
    first, again, other = (
        grade_candidate(client, spec, shown, seed=seed).cases[0].got for seed in (DET_SEED, DET_SEED, "ab" * 32)
    )
    assert first == again != other


def test_a_specs_memory_limit_reaches_the_candidate(embedded):
    code = "import resource\ndef f(): return resource.getrlimit(resource.RLIMIT_AS)[0] >> 20 in range(2048, 2400)"
    spec = UnitTestReward([{"input": [], "expected": True}], "f", limits={"memory_mib": 2048})
    assert grade_candidate(embedded, spec, code, seed=DET_SEED).reward == 1.0


@pytest.mark.parametrize("way", ["thread", "pool", "child"])
def test_waiting_for_a_core_is_nobodys_fault(embedded, way):
    burn = "import time\ndef burn():\n    end = time.process_time() + 1.0\n    while time.process_time() < end: pass\n"
    ways = {
        "thread": "import threading\ndef f():\n    t = threading.Thread(target=burn); t.start(); t.join(); return 1",
        "pool": "import multiprocessing\ndef f():\n    with multiprocessing.Pool(1) as p: p.apply(burn)\n    return 1",
        "child": "import os\ndef f():\n    pid = os.fork()\n    if not pid: burn(); os._exit(0)\n"
        "    os.waitpid(pid, 0); return 1",
    }
    limits = {"time_s": 2.5, "wall_time_s": 60}  # eight at once on few cores take much longer than that by the wall
    spec = UnitTestReward([{"input": [], "expected": 1}], "f", limits=limits)
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda _: grade(embedded, "python", burn + ways[way], spec), range(8)))
    assert [result.reward for result in results] == [1.0] * 8


def test_memory_of_several_processes_is_one_limit(embedded):
    code = "import os, time\ndef f():\n    for _ in range(4):\n        if not os.fork():\n"
    code += "            x = b'x' * (200 << 20); time.sleep(30)\n    time.sleep(30)"
    spec = UnitTestReward([{"input": [], "expected": 1}], "f", limits={"memory_mib": 300})
    result = grade_candidate(embedded, spec, code, seed=DET_SEED)
    assert (result.verdict, result.reward, result.total) == (Verdict.MEMORY, 0.0, 1)


def test_property_cases_follow_the_seed(client):
    spec = spec_from_dict(GOLDEN["sort right"].spec)
    first, again, other = (prepare_cases(client, spec, seed) for seed in (DET_SEED, DET_SEED, "ab" * 32))
    assert first == again != other
    assert len(first) == 12


BAD_CODE_OF_SPECS = {
    "reference raises": {**GOLDEN["sort right"].spec, "reference": "def reference(x): return 1/0"},
    "generator loops": {**GOLDEN["sort right"].spec, "generator": "def generate(rng):\n    while 1: pass"},
    "generate raises": {**GOLDEN["sort right"].spec, "generator": "def generate(rng): return rng.nothing()"},
    "reference gives an object": {**GOLDEN["sort right"].spec, "reference": "def reference(x): return object()"},
    "test never calls": asserting("def test_it():\n    assert f(1) == 1", "twice"),
    "test imports nothing": asserting("import no_such_module\nassert twice(1) == 2", "twice"),
    "prelude exits": {**GOLDEN["twice right"].spec, "prelude": "import os; os._exit(0)"},
    "prelude loops": {**GOLDEN["twice right"].spec, "prelude": "while True: pass"},
    "program prelude raises": {**GOLDEN["adder right"].spec, "prelude": "1/0"},
    "prelude raises": {**GOLDEN["twice right"].spec, "prelude": "1/0"},
}


@pytest.mark.parametrize("data", BAD_CODE_OF_SPECS.values(), ids=BAD_CODE_OF_SPECS)
def test_a_specs_own_failure_is_no_reward(embedded, data):
    with pytest.raises(CheckerError):
        grade(embedded, "python", "solve = twice = sorted", spec_from_dict(data))


def test_killing_the_parent_is_the_candidates_own_crash(client):
    killer = "import os\nos.kill(os.getppid(), 9)\ndef cube(n): return n ** 3"
    result = grade(client, "python", killer, CUBE)
    assert (result.reward, result.valid, result.verdict) == (0.0, True, Verdict.CRASHED)


def test_no_daemon_is_an_infra_error(tmp_path):
    with SandboxClient(unix_socket=tmp_path / "none.sock", retry_budget=0.2) as client:
        with pytest.raises(SandboxUnavailable):
            grade(client, "python", "def cube(n): return 8", CUBE)
        codes = ["def cube(n): return 8", "x"]
        zeros = grade_batch(client, "python", codes, CUBE, on_infra_error="zero")
        assert [(r.reward, r.valid, r.infra_error, r.error) for r in zeros] == [
            (0.0, False, True, "SandboxUnavailable")
        ] * 2
        assert grade_batch(client, "python", codes, CUBE, on_infra_error="skip") == []


def test_grade_batch_keeps_order(client):
    codes = [f"def cube(n): return {answer}" for answer in (8, 9, 8)]
    results = grade_batch(client, "python", codes, CUBE, seeds=[None, DET_SEED, None], concurrency=2)
    assert [r.reward for r in results] == [1.0, 0.0, 1.0]
    assert results[1].seed == DET_SEED


def test_a_session_serves_several_grades(client):
    session = client.create_session("python")["session_id"]
    try:
        for answer, reward in ((8, 1.0), (1, 0.0)):
            result = grade(client, "python", f"def cube(n): return {answer}", CUBE, session_id=session)
            assert result.reward == reward
    finally:
        client.delete_session(session)


BAD_ARGUMENTS = [
    {"on_infra_error": "odd"},
    {"seeds": [None]},
    {"seeds": ["xyz", None]},
    {"timeout_seconds": 0},
    {"concurrency": 0},
    {"candidates": "def cube(n): return 8"},
    {"candidates": [1, 2]},
    {"spec": "unit_tests"},
]


@pytest.mark.parametrize("arguments", BAD_ARGUMENTS, ids=str)
def test_bad_arguments_are_one_line(plain, arguments):
    asked = {"candidates": ["a", "b"], "spec": CUBE, **arguments}
    with pytest.raises((ConfigError, SpecError), match="expected"):
        grade_batch(plain, "python", asked.pop("candidates"), asked.pop("spec"), **asked)


def test_a_dict_is_a_spec_too(plain):
    assert grade(plain, "python", "def cube(n): return 8", CUBE.to_dict()).reward == 1.0


def test_an_unknown_template_is_the_callers_mistake(client):
    with pytest.raises(ConfigError, match="rust"):
        grade(client, "rust", "def cube(n): return 8", CUBE)


def test_test_code_is_refused_where_a_plain_daemon_has_no_root(tmp_path):
    system_python = shutil.which("python3", path="/usr/bin")
    if os.geteuid() != 0 or system_python is None:
        pytest.skip("needs root, and an interpreter that another user can read")
    request = {"kind": "asserts", "nonce": "n", "root_only": True}
    program = tmp_path / "program.py"
    program.write_text(runner_code("main()"))
    with open(program) as source:
        done = subprocess.run(
            [system_python, "-c", source.read()], input=json.dumps(request).encode(), capture_output=True, user=65534
        )
    assert "without root" in read_report(done.stdout.decode(), "n").refused


def test_the_in_session_program_is_small():
    assert len(runner_code("main('/tmp/x.json')")) < 40 << 10
