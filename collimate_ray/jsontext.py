"""JSON text of any depth, from and for a hostile peer: bounded, no NaN, no recursion error.

The standard library's reader and writer do the work; where they meet the recursion limit, a stack of our own goes on.
Joined into the in-session program like ``values.py``, so: standard library only, Python 3.8+, nothing of ours.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from json.decoder import scanstring  # type: ignore[attr-defined]
from json.scanner import NUMBER_RE
from typing import Any

#: Deepest nesting that crosses.
MAX_DEPTH = 2000


#: Lists and objects of one text: each takes some 60 bytes once it is read.
MAX_CONTAINERS = 4_000_000


class ValueCrossingError(ValueError):
    """A value that cannot cross: too deep, too large, of no plain kind, or text that is no such encoding."""


def dumps(tree: Any) -> str:
    """Write an encoded tree as ASCII JSON, however deep it is."""
    try:
        return json.dumps(tree, allow_nan=False, separators=(",", ":"))
    except RecursionError:
        return _dumps_deep(tree)


def _dumps_deep(tree: Any) -> str:
    out: list[str] = []
    work: list[Any] = [(tree,)]
    while work:
        item = work.pop()
        if type(item) is str:  # text to write as it is; values come wrapped
            out.append(item)
        elif type(item[0]) is list:
            work += _interleave("[", [[(part,)] for part in item[0]], "]")
        elif type(item[0]) is dict:
            work += _interleave("{", [[json.dumps(k) + ":", (v,)] for k, v in item[0].items()], "}")
        else:
            out.append(json.dumps(item[0], allow_nan=False))
    return "".join(out)


def _interleave(opening: str, groups: list[list[Any]], closing: str) -> list[Any]:
    """Give the pieces of a container in the order in which a stack must hold them."""
    pieces: list[Any] = [opening]
    for i, group in enumerate(groups):
        pieces += ([","] if i else []) + group
    return ([*pieces, closing])[::-1]


def loads(text: str) -> Any:
    """Read JSON text of a hostile origin: bounded depth, no NaN, no recursion error.

    Raises:
        ValueCrossingError: It is not JSON, is too deep, or holds a constant that is not JSON.
    """
    if text.count("[") + text.count("{") > MAX_CONTAINERS:
        raise ValueCrossingError("JSON of over 4,000,000 containers")
    try:
        return json.loads(text, parse_constant=_no_constant)
    except RecursionError:
        return _loads_deep(text)
    except ValueCrossingError:
        raise
    except ValueError as error:  # int() refuses over 4,300 digits: bigger ones cross as hex
        raise ValueCrossingError("not JSON: %s" % error) from None


def _no_constant(name: str) -> Any:
    raise ValueCrossingError("not JSON: " + name)


def _loads_deep(text: str) -> Any:
    """Read deep JSON with a stack of our own; only what ``dumps`` writes (no spaces) is taken."""
    stack: list[Any] = []
    keys: list[Any] = []
    value: Any = None
    at, have = 0, False
    try:
        while True:
            if have and not stack:
                if at != len(text):
                    raise ValueCrossingError("not JSON: text after the end")
                return value
            mark = text[at]
            if have:
                at, have, value = _attach(text, at, mark, stack, keys, value)
            elif mark in "[{" and text[at + 1] not in "]}":
                stack.append([] if mark == "[" else {})
                if len(stack) > 3 * MAX_DEPTH + 64:  # a level of a dict is three of JSON
                    raise ValueCrossingError("JSON nested too deep")
                at = at + 1 if mark == "[" else _read_key(text, at + 1, keys)
            else:
                value, at = _read_leaf(text, at)
                have = True
    except ValueCrossingError:
        raise
    except (IndexError, ValueError, StopIteration):
        raise ValueCrossingError("not JSON: cut short, or a number of too many digits") from None


def _attach(text: str, at: int, mark: str, stack: list[Any], keys: list[Any], value: Any) -> tuple[int, bool, Any]:
    """Put a finished value into its container; tell where to go on, whether a value is at hand, and which."""
    top = stack[-1]
    if type(top) is list:
        top.append(value)
    else:
        top[keys.pop()] = value
    if mark == ",":
        return (at + 1 if type(top) is list else _read_key(text, at + 1, keys)), False, None
    if mark != ("]" if type(top) is list else "}"):
        raise ValueCrossingError("not JSON: expected , or the end of a container")
    return at + 1, True, stack.pop()


def _read_key(text: str, at: int, keys: list[Any]) -> int:
    if text[at] != '"':
        raise ValueCrossingError("not JSON: expected a key")
    key, at = scanstring(text, at + 1, True)
    if text[at] != ":":
        raise ValueCrossingError("not JSON: expected :")
    keys.append(key)
    return int(at) + 1


#: words of JSON that are whole values, and how each is made
_WORDS: tuple[tuple[str, Callable[[], Any]], ...] = (
    ("null", lambda: None),
    ("true", lambda: True),
    ("false", lambda: False),
    ("[]", list),
    ("{}", dict),
)


def _read_leaf(text: str, at: int) -> tuple[Any, int]:
    if text[at] == '"':
        value, end = scanstring(text, at + 1, True)
        return value, end
    for word, make in _WORDS:
        if text.startswith(word, at):
            return make(), at + len(word)
    match = NUMBER_RE.match(text, at)
    if match is None:
        raise ValueCrossingError("not JSON: expected a value")
    whole, fraction, exponent = match.groups()
    number = float(match.group()) if fraction or exponent else int(whole)
    return number, match.end()
