"""Parsing Python source in a process with threads. Pure; runs nothing of it.

CPython's conversion of a syntax tree to Python objects keeps its recursion depth in one place for all threads, until
3.11.9 and 3.12.4 (python/cpython#106905): two parses at once can both end in ``SystemError``. So ours take turns, and
one that met somebody else's is made again.
"""

from __future__ import annotations

import ast
import threading

_TURN = threading.Lock()

#: Tries of one parse: others of the process seldom parse at all.
_TRIES = 5


def parse_python(source: str, filename: str = "<source>") -> ast.Module:
    """Parse source text.

    Args:
        source: The text.
        filename: What the compiler's messages call it.

    Raises:
        SyntaxError: It is not Python.
        ValueError: It holds characters that no source may, such as NUL or a lone surrogate.
        RecursionError, MemoryError: It is nested too deep for the compiler.
    """
    for _ in range(_TRIES - 1):
        try:
            with _TURN:
                return ast.parse(source, filename)
        except SystemError:
            continue
    with _TURN:
        return ast.parse(source, filename)
