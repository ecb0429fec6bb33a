"""The plain encoding in which values cross between a session and the judge; never pickle, never eval.

JSON values stand for themselves; anything else is ``{"$": tag, "v": ...}`` (design: API, Values that cross; ``std``
holds a value type of the standard library: its name, and the plain parts that it is made of again). The same
text runs on both sides: here it is imported, and inside a session it is part of the runner's source, so this module is
standard library only, Python 3.8+, and imports nothing of ours. Every walk is iterative: a value 2,000 deep must not
meet the recursion limit of a process of ours. Methods that a candidate's object overrides are never called.
"""

from __future__ import annotations

import base64
import builtins
import collections
import datetime
import decimal
import fractions
import math
import re
import sys
from collections.abc import Callable
from typing import Any

from collimate_ray.jsontext import MAX_DEPTH, ValueCrossingError, dumps, loads

__all__ = ["MAX_VALUE_BYTES", "STANDARD", "ValueCrossingError", "decode", "dumps", "encode", "loads"]

#: Most bytes of JSON text that cross as one value.
MAX_VALUE_BYTES = 16 << 20

#: Most parts of one value: bounds a small object that shares its parts 2**n times.
MAX_PARTS = 2_000_000

#: Keys of one hash in a set or dict, at most; honest ones hardly ever share any.
_MAX_COLLISIONS = 100

#: Keys of one set or dict: keys of different hashes can be chosen to meet in its table, too.
_MAX_KEYS = 50_000

#: A numeric dtype's name; numpy's own parser takes more, and raises whatever it likes.
_DTYPE = re.compile(r"[<>|=]?[biufc]\d{1,2}\Z")

#: Bits of an integer that a fraction or range is made of: reducing a fraction takes quadratic time.
_MAX_PART_BITS = 100_000

#: Integers up to here are exact in every JSON reader.
MAX_PLAIN_INT = 1 << 53

_NONE = type(None)

#: Value types of the standard library that cross exactly (a subclass does not): how each is taken apart, the types of
#: its parts, and how it is made again.
STANDARD: dict[str, tuple[type, Callable[[Any], list[Any]], tuple[Any, ...], Callable[..., Any]]] = {
    "bytearray": (bytearray, lambda v: [bytes(v)], (bytes,), bytearray),
    "range": (range, lambda v: [v.start, v.stop, v.step], (int, int, int), range),
    "Decimal": (decimal.Decimal, lambda v: [str(v)], (str,), decimal.Decimal),
    "Fraction": (fractions.Fraction, lambda v: [v.numerator, v.denominator], (int, int), fractions.Fraction),
    "date": (datetime.date, lambda v: [v.toordinal()], (int,), datetime.date.fromordinal),
    "timedelta": (
        datetime.timedelta,
        lambda v: [v.days, v.seconds, v.microseconds],
        (int, int, int),
        datetime.timedelta,
    ),
    "datetime": (datetime.datetime, lambda v: [v.isoformat()], (str,), datetime.datetime.fromisoformat),
    "time": (datetime.time, lambda v: [v.isoformat()], (str,), datetime.time.fromisoformat),
    "deque": (collections.deque, lambda v: [list(v), v.maxlen], (list, (int, _NONE)), collections.deque),
    "Counter": (collections.Counter, lambda v: [dict(v)], (dict,), collections.Counter),
    "OrderedDict": (collections.OrderedDict, lambda v: [dict(v)], (dict,), collections.OrderedDict),
    "defaultdict": (
        collections.defaultdict,
        lambda v: [v.default_factory, dict(v)],
        ((type, _NONE), dict),
        collections.defaultdict,
    ),
}
_STANDARD_NAMES = {row[0]: name for name, row in STANDARD.items()}

#: Bases whose subclasses cross as the base, read by the base's own methods.
_BASES = (bool, int, float, complex, str, bytes, bytearray, list, tuple, dict, set, frozenset)

#: numpy kinds that cross as raw bytes: bool, int, unsigned, float, complex.
_ARRAY_KINDS = "biufc"


def encode(value: Any, ref: Callable[[Any], Any] | None = None) -> Any:
    """Encode a value.

    Args:
        value: Any Python value.
        ref: Called with an object that has no plain form; gives the ``v`` of a ``ref`` tag. None: such an object is an
            error.

    Returns:
        A JSON-able tree.

    Raises:
        ValueCrossingError: Too deep, too large or, without ``ref``, an object of no plain kind.
    """
    root: list[Any] = [None]
    work: list[tuple[Any, Any, Any, int]] = [(value, root, 0, 0)]
    budget = MAX_VALUE_BYTES
    parts = 0
    while work:
        item, parent, key, depth = work.pop()
        parts += 1
        if depth > MAX_DEPTH or parts > MAX_PARTS:
            raise ValueCrossingError("value nested over 2,000 deep or of over 2,000,000 parts")
        node, children = _encode_one(item, ref)
        if type(node) is str:
            budget -= len(node)
        elif type(node) is dict and type(node["v"]) is str:
            budget -= len(node["v"])
        if budget < 0:
            raise ValueCrossingError("value over 16 MiB")
        parent[key] = node
        for child, slot, place in children:
            work.append((child, slot, place, depth + 1))
    return root[0]


def _encode_one(item: Any, ref: Callable[[Any], Any] | None) -> tuple[Any, list[tuple[Any, Any, Any]]]:
    """Encode one level; the children come back as (child, container, place) to fill."""
    if type(item) in _STANDARD_NAMES and not _has_own_factory(item):
        return _encode_standard(item)
    kind = _base_of(type(item))
    if item is None or kind is bool:
        return item, []
    if kind is str:
        return _encode_str(str.__str__(item)), []
    if kind is int:
        return _encode_int(int.__index__(item)), []
    if kind is float:
        return _encode_float(float.__pos__(item)), []
    if kind in (list, tuple):
        slots: list[Any] = [None] * kind.__len__(item)
        node: Any = slots if kind is list else {"$": "tuple", "v": slots}
        return node, [(child, slots, i) for i, child in enumerate(kind.__iter__(item))]
    if kind in (set, frozenset):
        slots = [None] * kind.__len__(item)
        tag = "set" if kind is set else "frozenset"
        return {"$": tag, "v": slots}, [(child, slots, i) for i, child in enumerate(kind.__iter__(item))]
    if kind is dict:
        return _encode_dict(item)
    return _encode_leaf(item, kind, ref), []


def _base_of(cls: type) -> Any:
    if cls in _BASES:
        return cls
    for base in type.mro(cls) if type(cls) is type else cls.__mro__:
        if base in _BASES:
            return base
    return None


def _encode_str(text: str) -> Any:
    if text.isascii():
        return text
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return {"$": "str", "v": _b64(text.encode("utf-8", "surrogatepass"))}
    return text


def _encode_int(number: int) -> Any:
    return number if -MAX_PLAIN_INT <= number <= MAX_PLAIN_INT else {"$": "int", "v": hex(number)}


def _encode_float(number: float) -> Any:
    return number if math.isfinite(number) else {"$": "float", "v": float.__repr__(number)}


def _encode_dict(item: dict[Any, Any]) -> tuple[Any, list[tuple[Any, Any, Any]]]:
    pairs: list[list[Any]] = []
    children: list[tuple[Any, Any, Any]] = []
    for name, child in dict.items(item):
        pair: list[Any] = [None, None]
        pairs.append(pair)
        children += [(name, pair, 0), (child, pair, 1)]
    return {"$": "dict", "v": pairs}, children


def _has_own_factory(item: Any) -> bool:
    """Tell a defaultdict that makes values by code of its own: it crosses as the dict that it is."""
    if type(item) is not collections.defaultdict or item.default_factory is None:
        return False
    factory = item.default_factory
    return type(factory) is not type or vars(builtins).get(getattr(factory, "__name__", "")) is not factory


def _encode_standard(item: Any) -> tuple[Any, list[tuple[Any, Any, Any]]]:
    name = _STANDARD_NAMES[type(item)]
    parts = [name, *STANDARD[name][1](item)]
    slots: list[Any] = [None] * len(parts)
    return {"$": "std", "v": slots}, [(part, slots, i) for i, part in enumerate(parts)]


def _encode_leaf(item: Any, kind: Any, ref: Callable[[Any], Any] | None) -> Any:
    if kind in (bytes, bytearray):
        return {"$": "bytes", "v": _b64(bytes(kind.__getitem__(item, slice(None))))}
    if kind is complex:
        # adding to zero by the base's own method drops a subclass and keeps both parts (but for -0.0)
        whole = complex.__add__(item, 0j) if type(item) is not complex else item
        return {"$": "complex", "v": [_encode_float(whole.real), _encode_float(whole.imag)]}
    if type(item) is type and vars(builtins).get(getattr(item, "__name__", "")) is item:
        return {"$": "type", "v": getattr(item, "__name__", "")}
    if isinstance(item, BaseException) and type(item).__module__ == "builtins":
        return {"$": "exc", "v": [type(item).__name__, _text_of(item)]}
    array = _encode_array(item)
    if array is not None:
        return array
    if ref is None:
        raise ValueCrossingError("no plain form for an object of type " + type(item).__name__)
    return {"$": "ref", "v": ref(item)}


def _encode_array(item: Any) -> Any:
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(item, (numpy.ndarray, numpy.generic)):
        return None
    array = numpy.asarray(item)
    if array.dtype.kind not in _ARRAY_KINDS or array.dtype.itemsize > 16:
        return None
    return {"$": "ndarray", "v": [array.dtype.str, list(array.shape), _b64(array.tobytes())]}


def _text_of(error: BaseException) -> str:
    args = error.args
    return args[0] if len(args) == 1 and type(args[0]) is str else ""


def _b64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _spread(keys: list[Any]) -> list[Any]:
    """Refuse keys that were chosen to collide: a set of them takes quadratic time to build."""
    if len(keys) > _MAX_KEYS:
        raise ValueCrossingError("a set or dict of over 50,000 keys")
    if len(keys) > _MAX_COLLISIONS and len({hash(key) for key in keys}) < len(keys) - _MAX_COLLISIONS:
        raise ValueCrossingError("keys that collide")
    return keys


#: how a container is made of its decoded parts
_CONTAINERS: dict[str, Callable[[list[Any]], Any]] = {
    "list": lambda parts: parts,
    "tuple": tuple,
    "set": lambda parts: set(_spread(parts)),
    "frozenset": lambda parts: frozenset(_spread(parts)),
    "dict": lambda parts: dict(zip(_spread(parts[::2]), parts[1::2])),
    "std": lambda parts: _make_standard(*parts),
}


def _make_standard(name: str, *parts: Any) -> Any:
    kind, _, types, make = STANDARD[name]
    if len(parts) != len(types) or not all(map(isinstance, parts, types)):
        raise ValueCrossingError("not the parts of a " + name)
    if any(type(part) is int and part.bit_length() > _MAX_PART_BITS for part in parts):
        raise ValueCrossingError("a %s of numbers too large" % name)
    made = make(*parts)
    if type(made) is not kind:
        raise ValueCrossingError("not a " + name)
    return made


def decode(node: Any, resolve: Callable[[Any], Any] | None = None) -> Any:
    """Decode what ``encode`` made, or what a hostile peer says it made.

    Args:
        node: The tree, as JSON gave it.
        resolve: Gives the object for the ``v`` of a ``ref`` tag. None: such a tag is an error.

    Returns:
        Plain Python values (and numpy arrays or scalars), fresh.

    Raises:
        ValueCrossingError: The tree is no such encoding.
    """
    try:
        return _decode(node, resolve)
    except ValueCrossingError:
        raise
    except (TypeError, ValueError, KeyError, IndexError, AttributeError, ArithmeticError) as error:
        raise ValueCrossingError("not an encoded value: %s" % error) from None


def _decode(node: Any, resolve: Callable[[Any], Any] | None) -> Any:
    # a frame: how to make the container, its encoded parts, its decoded parts so far
    stack: list[tuple[Callable[[list[Any]], Any], list[Any], list[Any]]] = [(lambda parts: parts[0], [node], [])]
    room = MAX_PARTS
    while True:
        make, pending, done = stack[-1]
        if len(done) == len(pending):
            value = make(done)
            stack.pop()
            if not stack:
                return value
            stack[-1][2].append(value)
            continue
        child = pending[len(done)]
        kind, parts = _open(child)
        if kind is None:
            done.append(child)
        elif kind in _CONTAINERS:
            room -= len(parts) + 1
            if room < 0:
                raise ValueCrossingError("value of over 2,000,000 parts")
            stack.append((_CONTAINERS[kind], parts, []))
            if len(stack) > MAX_DEPTH + 2:
                raise ValueCrossingError("value nested over 2,000 deep")
        else:
            done.append(_decode_leaf(kind, parts, resolve))


def _open(node: Any) -> tuple[str | None, Any]:
    """Split a node into its kind and parts; kind None: a plain leaf."""
    if type(node) is list:
        return "list", node
    if type(node) is not dict:
        return None, node
    if len(node) != 2:
        raise ValueCrossingError("an encoded object has exactly the keys $ and v")
    tag, parts = node["$"], node["v"]
    if tag == "dict":
        if any(len(pair) != 2 for pair in parts):
            raise ValueCrossingError("a dict is a list of pairs")
        return tag, [part for pair in parts for part in pair]
    if tag in _CONTAINERS and type(parts) is not list:
        raise ValueCrossingError("a container holds a list")
    return tag, parts


def _decode_leaf(tag: str, body: Any, resolve: Callable[[Any], Any] | None) -> Any:
    if tag == "int":
        return int(body, 16)
    if tag == "float" and body in ("nan", "inf", "-inf"):
        return float(body)
    if tag == "str":
        return base64.b64decode(body, validate=True).decode("utf-8", "surrogatepass")
    if tag == "bytes":
        return base64.b64decode(body, validate=True)
    if tag == "complex":
        real, imag = (part if type(part) in (int, float) else _decode_leaf("float", part["v"], None) for part in body)
        return complex(real, imag)
    if tag == "ndarray":
        return _decode_array(*body)
    if tag == "type":
        return _builtin(body, type)
    if tag == "exc":
        cls = _builtin(body[0], type)
        if not issubclass(cls, BaseException):
            raise ValueCrossingError("not an exception: " + body[0])
        return cls(str(body[1]))
    if tag == "ref" and resolve is not None:
        return resolve(body)
    raise ValueCrossingError("unknown tag")


def _builtin(name: Any, kind: type) -> Any:
    found = getattr(builtins, name, None) if type(name) is str else None
    if not isinstance(found, kind):
        raise ValueCrossingError("not the name of a builtin type")
    return found


def _decode_array(dtype: str, shape: list[int], body: str) -> Any:
    data = base64.b64decode(body, validate=True)
    try:
        import numpy
    except ImportError:
        raise ValueCrossingError("an array, and numpy is not there") from None
    if type(dtype) is not str or not _DTYPE.match(dtype):
        raise ValueCrossingError("not a numeric dtype")
    kind = numpy.dtype(dtype)
    if kind.kind not in _ARRAY_KINDS or any(type(n) is not int or not 0 <= n <= MAX_PARTS for n in shape):
        raise ValueCrossingError("not a numeric array")
    if math.prod(max(n, 1) for n in shape) * max(len(shape), 1) > MAX_PARTS:  # as lists it would fill the memory
        raise ValueCrossingError("an array of over 2,000,000 parts")
    array = numpy.frombuffer(data, kind).reshape(shape).copy()
    return array[()] if not shape else array
