import collections
import contextlib
import datetime
import decimal
import fractions
import json
import math
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from collimate_ray.values import ValueCrossingError, decode, dumps, encode, loads

SURROGATES = st.text(st.characters(categories=["Lu", "Cs", "Nd"]), max_size=6)
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-(2**200), 2**200)
    | st.floats(allow_nan=False)
    | SURROGATES
    | st.binary(max_size=8)
    | st.complex_numbers(allow_nan=False, allow_infinity=True)
)
HASHABLE = st.recursive(LEAVES, lambda parts: st.tuples(parts, parts) | st.frozensets(parts, max_size=3), max_leaves=6)
VALUES = st.recursive(
    LEAVES,
    lambda parts: (
        st.lists(parts, max_size=4)
        | st.tuples(parts, parts)
        | st.sets(HASHABLE, max_size=4)
        | st.dictionaries(HASHABLE, parts, max_size=4)
    ),
    max_leaves=20,
)


def crossed(value):
    return decode(loads(dumps(encode(value))))


def types_of(value):
    if isinstance(value, list | tuple):
        return [type(value), *map(types_of, value)]
    if isinstance(value, dict):
        return [dict, sorted(str((types_of(k), types_of(v))) for k, v in value.items())]
    if isinstance(value, set | frozenset):
        return [type(value), sorted(str(types_of(v)) for v in value)]
    return type(value)


@given(VALUES)
@settings(max_examples=300)
def test_values_cross_equal_and_of_the_same_type(value):
    back = crossed(value)
    assert back == value
    assert str(types_of(back)) == str(types_of(value))


@pytest.mark.parametrize("wrap", [lambda v: [v], lambda v: (v,), lambda v: {"k": v}, lambda v: {1: v}])
def test_values_cross_1990_deep(wrap):
    value = "core"
    for _ in range(1990):
        value = wrap(value)
    back, depth = crossed(value), 0
    while back != "core":
        back, depth = (next(iter(back.values())) if type(back) is dict else back[0]), depth + 1
    assert depth == 1990


def test_special_numbers_and_types_cross():
    back = crossed([math.nan, math.inf, -math.inf, -0.0, 2**53 + 1, 3**20000, int, ValueError("odd"), True])
    assert math.isnan(back[0])
    assert back[1:3] == [math.inf, -math.inf]
    assert math.copysign(1, back[3]) == -1
    assert back[4:7] == [2**53 + 1, 3**20000, int]
    assert (type(back[7]), back[7].args, back[8]) == (ValueError, ("odd",), True)


def test_arrays_cross_with_dtype_and_shape():
    back = crossed([np.arange(6, dtype=np.int16).reshape(2, 3), np.float32(1.5), np.array([True])])
    assert back[0].dtype == np.int16
    assert back[0].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert (type(back[1]), back[1]) == (np.float32, 1.5)


class Sly(list):
    def __iter__(self):
        raise RuntimeError("called")

    __len__ = __repr__ = __iter__


def test_subclasses_cross_as_their_base_and_no_override_runs():
    assert encode(Sly([1, 2])) == [1, 2]
    assert type(crossed(type("Mine", (collections.Counter,), {})("aab"))) is dict


STANDARD_VALUES = [
    decimal.Decimal("1.50"),
    decimal.Decimal("NaN"),
    fractions.Fraction(-1, 3),
    datetime.date(2024, 2, 29),
    datetime.datetime(2024, 2, 29, 23, 59, 59, 5),
    datetime.timedelta(-1, 3, 7),
    datetime.time(1, 2, 3),
    collections.deque([1, (2,)], 5),
    collections.Counter("abca"),
    collections.OrderedDict([("b", 1), ("a", 2)]),
    collections.defaultdict(list, {"a": [1]}),
    collections.defaultdict(None, {1: 2}),
    range(5, 1, -2),
    bytearray(b"\x00\xff"),
]


@pytest.mark.parametrize("value", STANDARD_VALUES, ids=lambda value: type(value).__name__)
def test_values_of_the_standard_library_cross_exactly(value):
    back = crossed([value])[0]
    assert type(back) is type(value)
    assert repr(back) == repr(value)


def test_objects_need_a_reference():
    with pytest.raises(ValueCrossingError, match="no plain form"):
        encode(object())
    node = encode([object()], ref=lambda item: [1, "mine"])
    assert decode(node, resolve=lambda body: tuple(body)) == [(1, "mine")]


def loop():
    value = []
    value.append(value)
    return value


def shared_parts():
    value = [0]
    for _ in range(64):
        value = [value, value]
    return value


@pytest.mark.parametrize("make", [loop, shared_parts, lambda: ["x" * (9 << 20)] * 2])
def test_endless_and_huge_values_are_refused(make):
    with pytest.raises(ValueCrossingError):
        encode(make())


BAD_TEXT = ["", "[1,", '{"$":1', "NaN", "[1}", "[" * 50_000, "[" * 9_000 + "]" * 9_000, '{"a"' * 4000]
DEEP_NUMBER = "[" * 1990 + "9" * 5000 + "]" * 1990
BAD_TREES = [
    {"$": "tuple"},
    {"$": "tuple", "v": 3},
    {"$": "set", "v": [[1]]},
    {"$": "dict", "v": [[1]]},
    {"$": "dict", "v": [[[], 1]]},
    {"$": "type", "v": "eval"},
    {"$": "type", "v": ["int"]},
    {"$": "exc", "v": ["int", ""]},
    {"$": "bytes", "v": "?"},
    {"$": "ndarray", "v": ["O", [1], ""]},
    {"$": "ndarray", "v": ["<i8", [-1], ""]},
    {"$": "ndarray", "v": ["<i8", [1 << 40], ""]},
    {"$": "float", "v": "1.0"},
    {"$": "ref", "v": [1, "mine"]},
    {"$": "os.system", "v": "true"},
    {"$": "int", "v": 3, "w": 4},
    {"$": "std", "v": ["Decimal", "x"]},
    {"$": "std", "v": ["date", 10**9]},
    {"$": "std", "v": ["range", "a"]},
    {"$": "std", "v": ["bytearray", 1 << 60]},
    {"$": "std", "v": ["bytearray", 1 << 34]},
    {"$": "std", "v": ["Popen", "true"]},
    {"$": "std", "v": ["defaultdict", "int", {"$": "dict", "v": []}]},
    {"$": "std", "v": ["datetime", 3]},
    {"$": "std", "v": ["Fraction", encode(1 << 200_000), encode((1 << 200_000) + 1)]},
    {"$": "std", "v": []},
]


@pytest.mark.parametrize("text", BAD_TEXT, ids=lambda text: text[:12])
def test_bad_text_is_refused(text):
    with pytest.raises(ValueCrossingError):
        decode(loads(text))


@pytest.mark.parametrize("tree", BAD_TREES, ids=lambda tree: str(tree)[:40])
def test_bad_trees_are_refused(tree):
    with pytest.raises(ValueCrossingError):
        decode([tree])


@given(st.recursive(st.none() | st.integers() | st.text(), lambda p: st.lists(p) | st.dictionaries(st.text(), p)))
def test_the_deep_reader_and_writer_agree_with_json(tree):
    from collimate_ray import jsontext

    assert jsontext._dumps_deep(tree) == json.dumps(tree, separators=(",", ":"))
    assert jsontext._loads_deep(dumps(tree)) == tree


HASH_PERIOD = (1 << 61) - 1
COLLIDING = [n * HASH_PERIOD for n in range(1, 20_000)]


@pytest.mark.parametrize(
    "tree",
    [
        {"$": "set", "v": encode(COLLIDING)},
        {"$": "frozenset", "v": encode([(n,) for n in COLLIDING])},
        {"$": "dict", "v": [[encode(n), 0] for n in COLLIDING]},
        {"$": "ndarray", "v": ["<i8", [1 << 20, 0], ""]},
        {"$": "ndarray", "v": ["<i8", [1000, 1000, 0], ""]},
        {"$": "ndarray", "v": ["|i1", [100_000] + [1] * 30, "A" * 133_332 + "AA=="]},
        {"$": "ndarray", "v": ["(1,,)f4", [1], "AAAA"]},
        {"$": "ndarray", "v": ["9" * 5000 + "f4", [1], "AAAA"]},
        {"$": "std", "v": ["OrderedDict", {"$": "dict", "v": [[encode(n), 0] for n in COLLIDING]}]},
        {"$": "set", "v": list(range(60_000))},
        [[]] * 2_100_000,
    ],
    ids=["set", "frozenset", "dict", "rows", "rows-of-rows", "axes", "dtype", "long-dtype", "ordered", "many", "parts"],
)
def test_values_made_to_choke_the_judge_are_refused(tree):
    with pytest.raises(ValueCrossingError):
        decode(tree)


def test_a_long_number_deep_down_is_refused_or_read():
    with contextlib.suppress(ValueCrossingError):  # by Python's limit on digits, where the process did not lift it
        decode(loads(DEEP_NUMBER))


def test_decoding_runs_nothing():
    code = "from collimate_ray.values import *; print(decode(loads(input())))"
    text = json.dumps([{"$": "exc", "v": ["SystemExit", "x"]}, {"$": "type", "v": "object"}])
    done = subprocess.run([sys.executable, "-c", code], input=text, capture_output=True, text=True, check=True)
    assert "SystemExit" in done.stdout
