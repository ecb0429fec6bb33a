import json
import time
from collections import deque

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from collimate_ray.errors import SpecError
from collimate_ray.results import Verdict
from collimate_ray.spec import (
    PropertyReward,
    Report,
    StdioReward,
    UnitTestReward,
    effective_limits,
    reward_spec_from_ground_truth,
    spec_from_dict,
)
from collimate_ray.spec.compare import Tolerance, checker_from, texts_equal, values_equal
from collimate_ray.spec.report import CaseRecord
from collimate_ray.values import encode

TOL = Tolerance()
UNIT = {"kind": "unit_tests", "tests": [{"input": [1], "expected": 2}, {"input": 3, "expected": [4]}]}
STDIO = {"kind": "stdin_stdout", "tests": [{"stdin": "1\n", "stdout": "2\n", "public": True, "points": 3}]}
ASSERT = {"kind": "assert_tests", "test_code": "assert f(1) == 2", "entry": "f", "isolation": "shared"}
PROPERTY = {
    "kind": "property",
    "reference": "def reference(x):\n    return x",
    "generator": "def generate(rng):\n    return [rng.random()]",
}


@pytest.mark.parametrize("data", [UNIT, STDIO, ASSERT, PROPERTY], ids=lambda data: data["kind"])
def test_specs_go_to_json_and_back(data):
    spec = spec_from_dict(data)
    again = spec_from_dict(json.loads(json.dumps(spec.to_dict())))
    assert again == spec
    assert again.spec_hash() == spec.spec_hash()
    assert spec.to_dict()["scoring"] == "all"


def test_the_sdks_constructors_score_by_fraction():
    assert UnitTestReward([{"input": 1, "expected": 1}]).scoring == "fraction"
    assert PropertyReward("    return x", "random.random()").scoring == "fraction"
    assert StdioReward([{"stdin": "", "stdout": ""}]).scoring == "all"


BAD = {
    "not an object": ([], "expected an object"),
    "kind": ({"kind": "odd"}, "kind: expected one of unit_tests"),
    "unknown key": ({**UNIT, "tets": 1}, "unknown key 'tets'"),
    "missing key": ({"kind": "assert_tests", "test_code": "assert f()"}, "entry is missing"),
    "no tests": ({"kind": "unit_tests", "tests": []}, "at least one test"),
    "tests are no list": ({"kind": "unit_tests", "tests": "x"}, "at least one test"),
    "test is no object": ({"kind": "unit_tests", "tests": [3]}, r"tests\[0\]: expected an object"),
    "test lacks expected": ({"kind": "unit_tests", "tests": [{"input": 1}]}, "'expected' is missing"),
    "test has more": ({"kind": "stdin_stdout", "tests": [{**STDIO["tests"][0], "x": 1}]}, "unknown key 'x'"),
    "stdin no text": ({"kind": "stdin_stdout", "tests": [{"stdin": 1, "stdout": ""}]}, "stdin: expected text"),
    "points": ({"kind": "unit_tests", "tests": [{"input": 1, "expected": 1, "points": 0}]}, "points: expected"),
    "public": ({"kind": "unit_tests", "tests": [{"input": 1, "expected": 1, "public": 1}]}, "public: expected"),
    "entry is a keyword": ({**UNIT, "entry": "class"}, "entry: expected a Python name"),
    "entry": ({**UNIT, "entry": "a b"}, "entry: expected a Python name"),
    "checker": ({**UNIT, "checker": "fuzzy"}, "checker: expected one of values"),
    "checker option": ({**UNIT, "checker": {"name": "float", "eps": 1}}, "unknown options"),
    "checker number": ({**UNIT, "checker": {"name": "float", "abs": -1}}, "checker.abs"),
    "scoring": ({**UNIT, "scoring": "best"}, "scoring: expected"),
    "first_n": ({**UNIT, "scoring": {"first_n": 0}}, "scoring: expected"),
    "limit name": ({**UNIT, "limits": {"time": 1}}, "unknown limit 'time'"),
    "limit value": ({**UNIT, "limits": {"time_s": 0}}, "limits.time_s: expected a number above 0"),
    "limit whole": ({**UNIT, "limits": {"processes": 1.5}}, "limits.processes: expected a whole number"),
    "isolation": ({**UNIT, "isolation": "shared"}, "isolation: expected separate"),
    "isolation name": ({**ASSERT, "isolation": "none"}, "isolation: expected separate or shared"),
    "template": ({**UNIT, "template": ""}, "template: expected"),
    "test code": ({**ASSERT, "test_code": "def f("}, "test_code is not Python"),
    "no assert": ({**ASSERT, "test_code": "x = 1"}, "at least one assert"),
    "prelude": ({**ASSERT, "prelude": "import"}, "prelude is not Python"),
    "k": ({**PROPERTY, "k": 0}, "k: expected"),
    "reference": ({**PROPERTY, "reference": ""}, "reference: expected source text"),
    "generator": ({**PROPERTY, "generator": "def generate(:"}, "generator is not Python"),
    "reference of another name": ({**PROPERTY, "reference": "def cube(x):\n    return x"}, "def reference"),
    "reference is broken": ({**PROPERTY, "reference": "def reference(x) return x"}, "reference is not Python"),
    "no generate": ({**PROPERTY, "generator": "def gen(rng):\n    return [1]"}, "def generate"),
}


@pytest.mark.parametrize(("data", "words"), BAD.values(), ids=BAD)
def test_bad_specs_are_one_clear_line(data, words):
    with pytest.raises(SpecError, match=words) as caught:
        spec_from_dict(data)
    assert "\n" not in str(caught.value).strip()


@pytest.mark.parametrize("truth", ["{", 3, {"reference": "x"}, [], '"text"'])
def test_bad_ground_truth(truth):
    with pytest.raises(SpecError):
        reward_spec_from_ground_truth(truth)


def test_ground_truths_of_the_sdk():
    assert reward_spec_from_ground_truth('[{"input": 1, "expected": 2}]', "f").entry == "f"
    spec = reward_spec_from_ground_truth({"reference": "    return x", "generator": "1", "k": 3, "entry": "g"}, "f")
    assert (spec.k, spec.entry, spec.scoring) == (3, "g", "fraction")


EQUAL = [
    ([1, 2], (1, 2)),
    (1, 1.0),
    (0.3, 0.1 * 3),
    (True, 1),
    ({"1": "a", "true": 2}, {1: "a", "true": 2}),
    ([10, 2.5, True], [np.int64(10), np.float64(2.5), np.bool_(True)]),
    ([[1, 2], [3, 4]], np.array([[1, 2], [3, 4]])),
    ({1, 2}, {2, 1}),
    (float("inf"), float("inf")),
    (1e300, 1e300 * (1 + 1e-9)),
    (b"a", b"a"),
    (2**20000, 2**20000),
    (3, 3.0000000000000004),
    (10**15, 1e15 + 0.25),
    (complex(0.3, 1), complex(0.1 + 0.2, 1)),
    ({"1": 2}, {np.int64(1): 2}),
    (b"ab", bytearray(b"ab")),
    (deque([0.3]), deque([0.1 + 0.2])),
]
UNEQUAL = [
    ([1, 2], {1, 2}),
    (8, "8"),
    (float("nan"), float("nan")),
    (50000000000000001, 50000000000000000),
    (2.3333333, 2.33),
    (None, 0),
    ("", None),
    ({"1": 1}, {1: 1, "1": 1}),
    ([1], [1, 1]),
    (1.0, 10**400),
    (0.5, complex(0.5, 1)),
    ("a", b"a"),
    ({1}, frozenset({1})),
    (1000000000, 1000000900.0),
]


@pytest.mark.parametrize(("expected", "got"), EQUAL, ids=lambda v: type(v).__name__)
def test_equal_values(expected, got):
    assert values_equal(expected, got, TOL)


@pytest.mark.parametrize(("expected", "got"), UNEQUAL, ids=lambda v: type(v).__name__)
def test_unequal_values(expected, got):
    assert not values_equal(expected, got, TOL)


@given(st.recursive(st.integers() | st.text() | st.none(), lambda parts: st.lists(parts) | st.tuples(parts)))
def test_every_value_equals_itself(value):
    assert values_equal(value, value, TOL)


SAME_TEXT = [
    ("7\r\n30\r\n", "7\n30\n"),
    ("   6\n", "6"),
    ("", "\n\n  \n"),
    ("0.333333333333", "0.3333333"),
    ("12", "+012"),
    ("-0", "0"),
    ("5.0", "5"),
    ("a  b", "a b"),
    ("9" * 5000, "9" * 5000),
]
OTHER_TEXT = [
    ("1\n2", "1 2"),
    ("1\n2\n3", "1\n2"),
    ("YES", "Yes"),
    ("0.33", "nan"),
    ("50000000000000000", "50000000000000001"),
    ("1", "1.1"),
    ("1\n\n2", "1\n2"),
    ("42", "\x1b[2K42"),
    ("1e5", "inf"),
    ("10", "1_0"),
    ("7", "seven"),
    ("1000000000", "1000000900.0"),
    ("123456700", "123456789.5"),
]


@pytest.mark.parametrize(("expected", "got"), SAME_TEXT)
def test_equal_texts(expected, got):
    assert texts_equal(expected, got, TOL)


@pytest.mark.parametrize(("expected", "got"), OTHER_TEXT)
def test_unequal_texts(expected, got):
    assert not texts_equal(expected, got, TOL)


def test_long_digits_cost_linear_time():
    def seconds(digits):
        began = time.process_time()
        assert not texts_equal("42", "1" * digits + "x", TOL)
        return time.process_time() - began

    # four times the digits: about four times as long; quadratic would be sixteen, and hours
    assert seconds(200_000) < 10 * max(seconds(50_000), 0.05)


def test_exact_and_float_checkers():
    assert not checker_from("exact", "stdin_stdout").texts("a\n", "a")
    assert checker_from({"name": "float", "abs": 0.1}, "unit_tests").values(1.0, 1.05)
    assert not checker_from("exact", "unit_tests").values(0.3, 0.1 * 3)


def reported(*cases, load="ok"):
    return Report(CaseRecord(load), cases)


def test_a_case_without_a_record_passes_nothing():
    spec = spec_from_dict(UNIT)
    judged = spec.judge(reported(CaseRecord("ok", encode(2))), spec.cases())
    assert (judged.reward, judged.verdict, judged.passed, judged.total) == (0.0, Verdict.CRASHED, 1, 2)


def test_scorings():
    tests = [{"input": i, "expected": i, "points": i + 1} for i in range(4)]
    records = [CaseRecord("ok", i if i != 1 else "no") for i in range(4)]
    for scoring, reward in {"all": 0.0, "fraction": 0.75, "points": 0.8}.items():
        spec = UnitTestReward(tests, scoring=scoring)
        assert spec.judge(reported(*records), spec.cases()).reward == reward
    spec = UnitTestReward(tests, scoring={"first_n": 1})
    assert spec.judge(reported(records[0]), spec.cases()).reward == 1.0


def test_a_failed_load_fails_every_case():
    spec = spec_from_dict(UNIT)
    judged = spec.judge(reported(load="timeout"), spec.cases())
    assert (judged.reward, judged.verdict, len(judged.cases)) == (0.0, Verdict.TIMEOUT, 2)


def test_limits_lie_over_each_other():
    limits = effective_limits({"time_s": 2, "files": 9}, {"time_s": 4})
    assert (limits["time_s"], limits["wall_time_s"], limits["files"]) == (4, 22, 9)
